# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration of the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from sphinx.util.nodes import make_refnode

import activation_swap

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

project = "activation_swap"
author = "the activation_swap contributors"
project_copyright = "the activation_swap contributors; Apache-2.0"
release = version = activation_swap.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "activation_swap"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Names of other projects: their inventories are on the network, and this site builds without one.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|transformers|pathlib|collections|typing|argparse|enum)(\..*)?"),
    (r"py:.*", r"(Any|Callable|Iterator|Iterable|Mapping|Sequence|Path|StrEnum|Enum|Protocol)"),
    (r"py:class", r"PreTrainedModel"),
    (r"py:.*", r"(dict|Mapping)\[.*"),
    (r"py:class", r"activation_swap\._swap\.Installation"),  # the private half of a Swap
]
_COLON = "\ue000"  # stands for a colon; a character that no text has

# Leaves no name behind: what a page shows has to import all that it uses.
doctest_global_setup = '__import__("torch").set_num_threads(1)'


def setup(app: Sphinx) -> None:
    """Connect the handlers below."""
    # Around napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", _hide_colons, priority=400)
    app.connect("autodoc-process-docstring", _show_colons, priority=600)
    app.connect("autodoc-process-signature", _no_model_signature)
    app.connect("missing-reference", _resolve_by_name)


def _hide_colons(_app: Any, what: str, *rest: Any) -> None:
    """Keep napoleon from reading ``An argument: its owner is outside`` as ``type: text``."""
    lines: list[str] = rest[-1]
    if what in {"attribute", "property"}:
        lines[:] = [line.replace(":", _COLON) for line in lines]


def _show_colons(_app: Any, _what: str, *rest: Any) -> None:
    lines: list[str] = rest[-1]
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def _no_model_signature(_app: Any, _what: str, _name: str, item: Any, *_: Any) -> Any:
    """Leave out the generated signature of a configuration: its keys are listed below it."""
    if isinstance(item, type) and issubclass(item, BaseModel):
        return "", None
    return None


def _resolve_by_name(_app: Any, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """Find what the API page documents under its public name, from wherever it is mentioned."""
    if node.get("refdomain") != "py":
        return None
    name = str(node["reftarget"]).rpartition(".")[2]
    # An object may be known by its public name and by that of the module that defines it.
    found = {
        entry.node_id: entry
        for full, entry in env.get_domain("py").objects.items()
        if full.rpartition(".")[2] == name and name[:1].isupper()
    }
    if len(found) != 1:
        return None
    (target,) = found.values()
    return make_refnode(
        env.app.builder, node["refdoc"], target.docname, target.node_id, [content], name
    )
