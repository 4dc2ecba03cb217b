# SPDX-License-Identifier: Apache-2.0
"""YAML that holds what JSON can hold, and nothing that is silently something else."""

from __future__ import annotations

from typing import Any, ClassVar

from yaml import MarkedYAMLError, Node, SafeLoader, load

__all__ = ["load_plain_yaml"]

_TAG = "tag:yaml.org,2002:"
_TEXT, _NUMBERS = f"{_TAG}str", {f"{_TAG}int", f"{_TAG}float"}
_JSON = {_TEXT, *_NUMBERS, *(f"{_TAG}{name}" for name in ("null", "bool", "seq", "map"))}


class _PlainLoader(SafeLoader):
    """Knows no dates, no numbers of base 60, no sets, no binary data; refuses duplicate keys."""

    yaml_constructors: ClassVar = {
        tag: constructor
        for tag, constructor in SafeLoader.yaml_constructors.items()
        if tag is None or tag in _JSON
    }

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> Any:
        """Leave ``2026-11-29`` and ``1:30`` the text that they are."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if tag == f"{_TAG}timestamp" or (tag in _NUMBERS and ":" in value):
            return _TEXT
        return tag

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Look at the keys as they are written, before ``<<`` merges others in."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            text = key.tag in {_TEXT, f"{_TAG}merge"}
            if not text or key.value in seen:
                problem = f"key {key.value!r} is {'there twice' if text else 'not text'}"
                raise MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def load_plain_yaml(text: str | bytes) -> Any:
    """Read a YAML document. No code is executed.

    Args:
        text: One document.

    Returns:
        Mappings with text as keys, lists, text, numbers, truth values and ``None``.

    Raises:
        yaml.YAMLError: It is no YAML, has a tag of another type or a key twice.
        ValueError: A tag does not fit its value.
    """
    return load(text, _PlainLoader)  # noqa: S506 - it is a safe loader
