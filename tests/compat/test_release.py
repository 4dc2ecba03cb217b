# SPDX-License-Identifier: Apache-2.0
"""Which version strings are taken for which release."""

from __future__ import annotations

import pytest

from activation_swap.compat.release import installed_release, read_release, untested_notice
from activation_swap.errors import Reason

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "text", ["4.51.0.dev0", "4.51.0", "5.24.0+local.1", "5.24.0rc1", "5.24.1.post1"]
)
def test_known_release(text: str) -> None:
    version, check = read_release(text)

    assert check.passed
    assert check.found == text
    assert check.expected == ">=4.51.dev0"
    assert check.subject == "transformers release"
    assert version is not None
    assert untested_notice(version) is None


@pytest.mark.parametrize("text", ["5.25.0.dev0", "5.25.0a1", "6.0"])
def test_newer_release_is_tried_with_a_notice(text: str) -> None:
    version, check = read_release(text)

    assert check.passed
    assert version is not None
    notice = untested_notice(version)
    assert notice is not None
    assert notice == (
        f"transformers {version} is newer than the releases that activation_swap was tested with "
        "(>=4.51.dev0, <5.25.dev0). Every fact that it relies on holds on this model, so it was "
        "applied."
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("4.50.3", Reason.VERSION_TOO_OLD),
        ("0", Reason.VERSION_TOO_OLD),
        ("", Reason.VERSION_UNREADABLE),
        ("4.51.x", Reason.VERSION_UNREADABLE),
        ("main", Reason.VERSION_UNREADABLE),
    ],
)
def test_refused_release(text: str, reason: Reason) -> None:
    version, check = read_release(text)

    assert version is None
    assert check.rejection is not None
    assert check.rejection.reason is reason
    assert check.found == text


def test_installed_release_is_what_the_imported_package_says() -> None:
    import transformers

    assert installed_release() == transformers.__version__
