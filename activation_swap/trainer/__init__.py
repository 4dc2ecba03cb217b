"""The reference trainer: a YAML file with one key, ``activation_swap``, and the commands."""
