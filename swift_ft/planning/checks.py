"""Numbers that a plan is made from: what cannot be one is named. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TypeGuard

from swift_ft.errors import UsageError


def check_not_negative(values: Mapping[str, object]) -> None:
    """See that all values are finite numbers of zero or more.

    Args:
        values: by what an error calls them.

    Raises:
        UsageError: one of them is not.
    """
    for name, value in values.items():
        if not _is_finite(value) or value < 0:
            raise UsageError(f"{name} is {value!r}: it must be a number of zero or more")


def check_positive(values: Mapping[str, object], of: str = "number") -> None:
    """See that all values are finite and more than zero.

    Args:
        values: by what an error calls them.
        of: the noun of what they must be: a positive number, or time.

    Raises:
        UsageError: one of them is not.
    """
    for name, value in values.items():
        if not _is_finite(value) or value <= 0:
            raise UsageError(f"{name} is {value!r}: it must be a positive {of}")


def _is_finite(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # 10**400
        return False
