"""The assignment problem, exact, in whole numbers: which device takes which slot so that most stays. Pure.

Shortest augmenting paths with dual prices (Jonker and Volgenant 1987), each part of the problem on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from swift_ft.errors import UsageError

Matrix = npt.NDArray[np.int64]
_LARGEST = 2**62


def assign(gain: Matrix) -> list[int]:
    """For each column its own row, with the largest sum of gains; the same input gives the same answer.

    Where several answers are best, one is preferred that gives column i its row i more often.

    Args:
        gain: not negative; rows x columns, at least as many rows as columns. The largest gain times the
            square of the number of columns must stay below 2**62.

    Raises:
        UsageError: if there are fewer rows than columns, or the gains are too large.
    """
    return fill(gaining(gain), gain.shape[0])


def gaining(gain: Matrix) -> list[int]:
    """The same, with -1 for columns that gain nothing more from one row than from another.

    Any of the rows that are left may take these columns.

    Raises:
        UsageError: as for :func:`assign`.
    """
    rows, columns = gain.shape
    if rows < columns:
        raise UsageError(f"{columns} slots need as many devices, there are {rows}: choose a smaller layout")
    if int(gain.max(initial=0)) >= _LARGEST // (columns + 1) ** 2:
        raise UsageError(f"gains of up to {gain.max()} for {columns} slots are too large: use a larger unit")
    if columns == 0:
        return []
    reduced = gain - gain.min(axis=0)  # each column is given once, so this changes no choice
    if rows == columns:
        reduced = reduced - reduced.min(axis=1)[:, None]
    taken = [-1] * columns
    for part_rows, part_columns in _parts(reduced > 0):
        weights = reduced[np.ix_(part_rows, part_columns)] * (columns + 1)
        weights = weights + (part_rows[:, None] == part_columns[None, :])
        for i, j in _match(weights.max() - weights):
            if reduced[part_rows[i], part_columns[j]] > 0:
                taken[int(part_columns[j])] = int(part_rows[i])
    return taken


def fill(taken: Sequence[int], rows: int) -> list[int]:
    """Gives each column without a row a free one: its own where that is free, else the first."""
    given, used = list(taken), set(taken)
    free = dict.fromkeys(row for row in range(rows) if row not in used)
    for column, row in enumerate(given):
        if row < 0 and column in free:
            given[column] = column
            del free[column]
    rest = iter(free)
    return [next(rest) if row < 0 else row for row in given]


def _parts(linked: npt.NDArray[np.bool_]) -> Iterator[tuple[Matrix, Matrix]]:
    """Rows and columns that are linked with each other and with no others."""
    unseen = linked.any(axis=1)
    while unseen.any():
        rows = np.zeros(linked.shape[0], dtype=bool)
        columns = np.zeros(linked.shape[1], dtype=bool)
        new = np.zeros_like(rows)
        new[int(np.argmax(unseen))] = True
        while new.any():
            rows |= new
            reached = linked[new].any(axis=0) & ~columns
            columns |= reached
            new = linked[:, reached].any(axis=1) & ~rows
        unseen &= ~rows
        yield np.flatnonzero(rows), np.flatnonzero(columns)


def _match(cost: Matrix) -> list[tuple[int, int]]:
    """Pairs of row and column with the smallest sum; all of the shorter side are in a pair."""
    if cost.shape[0] > cost.shape[1]:
        return [(i, j) for j, i in _match(np.ascontiguousarray(cost.T))]
    rows, columns = cost.shape
    row_price, column_price = cost.min(axis=1), np.zeros(columns, dtype=np.int64)
    row_of, column_of = np.full(columns, -1, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    for row in range(rows):  # what needs no path
        tight = np.flatnonzero((cost[row] == row_price[row]) & (row_of < 0))
        if tight.size:
            row_of[tight[0]], column_of[row] = row, tight[0]
    for alone in np.flatnonzero(column_of < 0):
        _augment(cost, int(alone), row_price, column_price, row_of, column_of)
    return [(i, int(column_of[i])) for i in range(rows)]


def _augment(
    cost: Matrix, start: int, row_price: Matrix, column_price: Matrix, row_of: Matrix, column_of: Matrix
) -> None:
    """Finds the cheapest path from a row without a column to a column without a row, and takes it."""
    distance = cost[start] - row_price[start] - column_price
    before = np.full(distance.shape, start)
    done = np.zeros(distance.shape, dtype=bool)
    passed = [start]
    while True:
        open_distance = np.where(done, np.iinfo(np.int64).max, distance)
        low = int(open_distance.min())
        nearest = np.flatnonzero(open_distance == low)
        free = nearest[row_of[nearest] < 0]
        column = int(free[0]) if free.size else int(nearest[0])
        if free.size:
            break
        done[column] = True
        row = int(row_of[column])
        passed.append(row)
        onward = low + cost[row] - row_price[row] - column_price
        nearer = ~done & (onward < distance)
        distance[nearer], before[nearer] = onward[nearer], row
    row_price[start] += low
    others = np.array(passed[1:], dtype=np.int64)
    row_price[others] += low - distance[column_of[others]]
    column_price[done] += distance[done] - low
    while True:
        row = int(before[column])
        row_of[column] = row
        column_of[row], column = column, int(column_of[row])
        if row == start:
            return
