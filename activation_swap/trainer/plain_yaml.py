# SPDX-License-Identifier: Apache-2.0
"""YAML that holds what JSON can hold, and nothing that is silently something else."""

from __future__ import annotations

from typing import IO, Any, ClassVar

from yaml import MarkedYAMLError, Node, SafeLoader, load

__all__ = ["load_plain_yaml"]

_TAG = "tag:yaml.org,2002:"
_TEXT, _NUMBERS = f"{_TAG}str", {f"{_TAG}int", f"{_TAG}float"}
_JSON = {_TEXT, *_NUMBERS, *(f"{_TAG}{name}" for name in ("null", "bool", "seq", "map"))}
_DEPTH = 64


class _PlainLoader(SafeLoader):
    """Knows no dates, no numbers of base 60, no sets, no binary data; refuses duplicate keys."""

    yaml_constructors: ClassVar = {
        tag: constructor
        for tag, constructor in SafeLoader.yaml_constructors.items()
        if tag is None or tag in _JSON
    }

    def __init__(self, stream: str | bytes | IO[bytes]) -> None:
        super().__init__(stream)
        self._depth = 0

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> Any:
        """Leave ``2026-11-29`` and ``1:30`` the text that they are."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if tag == f"{_TAG}timestamp" or (tag in _NUMBERS and ":" in value):
            return _TEXT
        return tag

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse what is nested so deeply that reading it would end in Python's own limit."""
        if self._depth == _DEPTH:
            problem = f"nested more than {_DEPTH} levels deep"
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise MarkedYAMLError(problem=problem, problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

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

    def construct_object(self, node: Any, deep: Any = False) -> Any:  # noqa: FBT002 - of SafeLoader
        """Name the line of a value that its tag does not fit: constructors raise what they like."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"not a value of {node.tag.removeprefix(_TAG)}: {error}"
            raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def load_plain_yaml(text: str | bytes | IO[bytes]) -> Any:
    """Read a YAML document. No code is executed.

    Args:
        text: One document, or a file that holds one; messages name the file.

    Returns:
        Mappings with text as keys, lists, text, numbers, truth values and ``None``.

    Raises:
        yaml.YAMLError: It is no YAML, has a tag of another type or that does not fit its value, has
            a key twice, or is nested more than 64 levels deep.
    """
    return load(text, _PlainLoader)  # noqa: S506 - it is a safe loader
