"""Which tests `make test` runs: all kinds of cases, and of a long list of cases of one kind a few.

Tests of whole clusters are many and slow. Of the cases of one parametrized test every third one is run, and
none of those that are marked as thorough; ``--thorough`` runs all (`make test-all`). A test that is named on
the command line is run anyway. Habits of scripts (`tests/cluster/habits`) are no cases of one kind: each is
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import pytest

__all__ = ["MARK", "chosen"]

MARK = "thorough"
_OF_CLUSTERS = ("cluster", "stores")
_EVERY = 3


def chosen(items: Iterable[pytest.Item], named: Sequence[str]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, and those to leave out.

    Args:
        items: all that were collected.
        named: the arguments of the command line.
    """
    if any("::" in name for name in named):
        return [*items], []
    run: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for _, group in groupby(items, _function):
        cases = [*group]
        marked = any(case.get_closest_marker(MARK) for case in cases)
        numbers = range(0, len(cases), 1 if marked or not _is_of_clusters(cases[0]) else _EVERY)
        for number, case in enumerate(cases):
            out = number not in numbers or case.get_closest_marker(MARK)
            (left_out if out else run).append(case)
    return run, left_out


def _function(item: pytest.Item) -> str:
    """A test's name without its case."""
    return item.nodeid.partition("[")[0]


def _is_of_clusters(item: pytest.Item) -> bool:
    _, folder, *inner = Path(item.location[0]).parts
    return folder in _OF_CLUSTERS and inner[0] != "habits"
