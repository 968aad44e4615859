"""Which tests `make test` runs: all kinds of cases, and of a long list of cases of one kind a few.

Tests of whole clusters are many and slow. Of the cases of one parametrized test every fifth one is run, and
none of those that are marked as thorough; ``--thorough`` runs all (`make test-all`). A test that is named on
the command line is run anyway. Habits of scripts (`tests/cluster/habits`) are no cases of one kind: each is
run. One that several tests of its file have, for replicas and for pipelines say, is run in half of them, and
which half differs from habit to habit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import pytest

__all__ = ["MARK", "chosen"]

MARK = "thorough"
_OF_CLUSTERS = ("cluster", "stores")
_EVERY = 5


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
    for _, group in groupby(items, _file):
        of_file = [*group]
        out = _repeated(of_file) if _is_habit(of_file[0]) else _alike(of_file)
        for item in of_file:
            leaves = id(item) in out or item.get_closest_marker(MARK)
            (left_out if leaves else run).append(item)
    return run, left_out


def _alike(items: Sequence[pytest.Item]) -> set[int]:
    """Four of five cases of each test of clusters, by id()."""
    out: set[int] = set()
    for _, group in groupby(items, _function):
        cases = [*group]
        marked = any(case.get_closest_marker(MARK) for case in cases)
        if _is_of_clusters(cases[0]) and not marked:
            out.update(id(case) for number, case in enumerate(cases) if number % _EVERY)
    return out


def _repeated(items: Sequence[pytest.Item]) -> set[int]:
    """Every second test of each habit, by id()."""
    of_habit: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        of_habit[item.nodeid.partition("[")[2] or item.nodeid].append(item)
    return {
        id(test)
        for number, tests in enumerate(of_habit.values())
        for place, test in enumerate(tests)
        if len(tests) > 1 and (number + place) % 2
    }


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _function(item: pytest.Item) -> str:
    """A test's name without its case."""
    return item.nodeid.partition("[")[0]


def _is_of_clusters(item: pytest.Item) -> bool:
    return Path(item.location[0]).parts[1] in _OF_CLUSTERS


def _is_habit(item: pytest.Item) -> bool:
    return Path(item.location[0]).parts[1:3] == ("cluster", "habits")
