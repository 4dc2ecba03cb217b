# SPDX-License-Identifier: Apache-2.0
"""The installed Transformers release: readable, supported, tested."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from activation_swap._check import Check
from activation_swap.compat.facts import SUPPORTED, TESTED, spelled
from activation_swap.errors import ActivationSwapError, Reason

__all__ = ["installed_release", "read_release", "untested_notice"]

_SUBJECT = "transformers release"


def installed_release() -> str:
    """Return what the imported transformers says its version is."""
    import transformers  # noqa: PLC0415 - this package imports without it

    version: str = transformers.__version__
    return version


def read_release(text: str) -> tuple[Version | None, Check]:
    """Parse a version and check that this package knows it, or may try.

    Args:
        text: What ``transformers.__version__`` says.

    Returns:
        The version, or ``None`` when it is refused; and the check.
    """
    try:
        version = Version(text)
    except InvalidVersion:
        rejection = Reason.VERSION_UNREADABLE.error(found=repr(text), where="transformers")
        return None, _refused(text, rejection)
    if not SUPPORTED.contains(version, prereleases=True):
        rejection = Reason.VERSION_TOO_OLD.error(found=text, where="transformers")
        return None, _refused(text, rejection)
    return version, Check(subject=_SUBJECT, expected=spelled(SUPPORTED), found=text)


def untested_notice(version: Version) -> str | None:
    """Return what to warn of when ``version`` is newer than every tested release."""
    if TESTED.contains(version, prereleases=True):
        return None
    return (
        f"transformers {version} is newer than the releases that activation_swap was tested with "
        f"({spelled(TESTED)}). Every fact that it relies on holds on this model, so it was applied."
    )


def _refused(text: str, rejection: ActivationSwapError) -> Check:
    return Check(subject=_SUBJECT, expected=spelled(SUPPORTED), found=text, rejection=rejection)
