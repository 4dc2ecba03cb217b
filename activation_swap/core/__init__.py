"""The engine: policy, saved storages, groups, pinned pool, transfers, hooks."""
