"""Tests that are skipped because something is not installed, and their summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

import pytest

_MISSING = "Missing: "
_NO_MODULE = "could not import "  # pytest.importorskip


def skip_for_missing(part: object) -> NoReturn:
    """Skips the test that runs, because ``part`` is missing. The summary at the end of the run lists it.

    Args:
        part: what is missing, and how to install it.
    """
    pytest.skip(f"{_MISSING}{part}")


def missing_parts(reasons: Iterable[str]) -> Counter[str]:
    """How many tests were skipped because of each missing part, from the reasons of all skips."""
    reasons = (reason.removeprefix("Skipped: ") for reason in reasons)
    return Counter(
        reason.removeprefix(_MISSING) for reason in reasons if reason.startswith((_MISSING, _NO_MODULE))
    )
