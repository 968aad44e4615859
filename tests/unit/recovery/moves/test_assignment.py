"""The assignment is the best one, by comparison with all others."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.recovery.moves.plan import assign, fill, gaining


def total(gain: np.ndarray, rows: list[int] | tuple[int, ...]) -> int:
    """The sum of gains of an assignment."""
    return sum(int(gain[row, column]) for column, row in enumerate(rows))


@st.composite
def gains(draw: st.DrawFn) -> np.ndarray:
    """Matrices of up to six rows, often with equal values and zeros."""
    columns = draw(st.integers(1, 5))
    rows = draw(st.integers(columns, 6))
    values = draw(st.sampled_from([st.integers(0, 2), st.integers(0, 10**12), st.sampled_from([0, 0, 0, 7])]))
    cells = draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
    return np.array(cells, dtype=np.int64).reshape(rows, columns)


@given(gains())
@settings(max_examples=150)
def test_no_other_assignment_gains_more(gain: np.ndarray) -> None:
    rows, columns = gain.shape
    found = assign(gain)
    assert len(set(found)) == columns
    best = max(total(gain, choice) for choice in permutations(range(rows), columns))
    assert total(gain, found) == best


@given(gains(), st.randoms(use_true_random=False))
def test_columns_left_open_may_go_to_any_free_row(gain: np.ndarray, random: object) -> None:
    taken = gaining(gain)
    free = [row for row in range(gain.shape[0]) if row not in taken]
    random.shuffle(free)  # type: ignore[attr-defined]
    rest = iter(free)
    other = [next(rest) if row < 0 else row for row in taken]
    assert total(gain, other) == total(gain, assign(gain))


def test_where_all_are_alike_each_stays() -> None:
    assert assign(np.full((6, 4), 3, dtype=np.int64)) == [0, 1, 2, 3]
    assert fill([-1, 0, -1], 4) == [1, 0, 2]


@pytest.mark.parametrize(
    ("gain", "words"), [(np.zeros((2, 3)), "there are 2"), (np.full((3, 3), 2**60), "too large")]
)
def test_what_cannot_be_assigned(gain: np.ndarray, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        assign(gain.astype(np.int64))
