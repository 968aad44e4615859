"""Numbers that are none, or have the wrong sign, are named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_not_negative, check_positive


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, 10**400, True, "1", None])
def test_what_is_no_number_from_zero_on(value: object) -> None:
    with pytest.raises(UsageError, match=r"^b is .*: it must be a number of zero or more"):
        check_not_negative({"a": 1, "b": value})
    with pytest.raises(UsageError, match=r"^b is .*: it must be a positive time"):
        check_positive({"a": 1, "b": value}, "time")


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(3)])
def test_numbers(value: object) -> None:
    check_not_negative({"a": value, "b": 0})
    check_positive({"a": value})
    with pytest.raises(UsageError, match=r"^b is 0: it must be a positive number"):
        check_positive({"a": value, "b": 0})
