"""Which tests `make test` runs, by what they show and how long they take.

Tests of whole clusters and of stores are many and slow: all their cases take hours. Their durations are
measured (`tests/durations.json`), and the choice has a budget, in seconds of tests. These run, whatever they
take:

- one case of each test function, and each habit of scripts (`tests/cluster/habits`) in one of the tests that
  have it;
- what is new, and so has no duration yet: nobody knows whether it passes;
- what failed in the last run here, until it passes (pytest's cache says so).

What is left of the budget is spent on cases that add most in a second: first on values of parameters that no
chosen case of their function has, then on pairs of values that none has together.

What is new or failed lately is all that counts as a risk. No subject is preferred: nothing that was measured
says of which subjects the tests fail more often.

Tests that are marked as thorough stay out; `--thorough` runs all (`make test-all`). A test that is named on
the command line is run anyway. The choice depends on the tests, their durations and the last failures alone,
so that all processes of a run make the same one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations
from pathlib import Path

import pytest

from tests.support.durations import of_file

MARK = "thorough"
BUDGET_S = 3200
"""Seconds of tests of clusters and stores that are run by default: 27 minutes of two workers.

One case of each function and habit takes 3,080 of them.
"""
_CHOSEN_FROM = (("cluster",), ("stores",), ("theirs",))
_LEAST_S = 0.1
"""Durations are rounded: one of 0 is no reason to run a test that adds nothing before all others."""

Shows = Callable[[pytest.Item], Collection[Hashable]]
"""Names what a case shows: kinds of cases, values, or pairs of values."""


def chosen(
    items: Iterable[pytest.Item],
    named: Sequence[str],
    *,
    durations: Mapping[str, float],
    failed: Collection[str] = (),
    budget_s: float = BUDGET_S,
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, and those to leave out.

    Args:
        items: all that were collected.
        named: the arguments of the command line.
        durations: seconds by test. A test that is not among them is new.
        failed: tests that failed when they were last run.
        budget_s: seconds of tests to choose. All kinds of cases are run even if these take longer.
    """
    all_items = [*items]
    if any("::" in name for name in named):
        return all_items, []
    unmarked = [item for item in all_items if not item.get_closest_marker(MARK)]
    cases = [item for item in unmarked if _is_chosen_from(item)]
    taken = {case.nodeid for case in cases if case.nodeid not in durations or case.nodeid in failed}
    for shows, limit_s in ((_kinds, math.inf), (_values, budget_s), (_pairs, budget_s)):
        _take(cases, taken, shows, durations, limit_s)
    left_out = {case.nodeid for case in cases} - taken
    run = [item for item in unmarked if item.nodeid not in left_out]
    running = {item.nodeid for item in run}
    return run, [item for item in all_items if item.nodeid not in running]


def in_order_of_files(items: Sequence[pytest.Item], durations: Mapping[str, float]) -> list[pytest.Item]:
    """The tests in the order in which workers should take files.

    The file that takes longest is first: one that began last would leave the other workers idle. Those of
    stores are last: their servers, of etcd, HDFS and S3, run from the first test that needs them to the end.
    """
    takes_s: dict[str, float] = defaultdict(float)
    for item in items:
        takes_s[of_file(item.nodeid)] += durations.get(item.nodeid, 0.0)

    def place(item: pytest.Item) -> tuple[bool, float]:
        file = of_file(item.nodeid)
        return Path(file).parts[1:2] == ("stores",), -takes_s[file]

    return sorted(items, key=place)


def _take(
    cases: Sequence[pytest.Item],
    taken: set[str],
    shows: Shows,
    durations: Mapping[str, float],
    limit_s: float,
) -> None:
    """Adds cases to the taken ones until all is shown or none fits: first what shows most in a second."""
    takes_s = [max(durations.get(case.nodeid, 0.0), _LEAST_S) for case in cases]
    left_s = limit_s - sum(s for case, s in zip(cases, takes_s, strict=True) if case.nodeid in taken)
    shown = {what for case in cases if case.nodeid in taken for what in shows(case)}

    def cost(place: int) -> float:
        """Minus what the case adds in a second."""
        return -len({*shows(cases[place])} - shown) / takes_s[place]

    queue = [(cost(place), place) for place, case in enumerate(cases) if case.nodeid not in taken]
    heapify(queue)
    while queue:
        before, place = queue[0]
        now = cost(place)
        if now == 0 or takes_s[place] > left_s:
            heappop(queue)
        elif now != before:  # others have shown some of it: it may not be the first any more
            heapreplace(queue, (now, place))
        else:
            heappop(queue)
            taken.add(cases[place].nodeid)
            shown.update(shows(cases[place]))
            left_s -= takes_s[place]


def _kinds(case: pytest.Item) -> list[Hashable]:
    """The function of a case, and its habit."""
    name = case.nodeid.partition("[")[2]
    return [_function(case), *([(of_file(case.nodeid), name)] if name and _is_habit(case) else [])]


def _values(case: pytest.Item) -> list[Hashable]:
    """The values of a case's parameters. Values of one function that look alike are one value."""
    callspec = getattr(case, "callspec", None)
    if callspec is None:
        return []
    return [(_function(case), name, repr(value)) for name, value in callspec.params.items()]


def _pairs(case: pytest.Item) -> list[Hashable]:
    return [*combinations(_values(case), 2)]


def _function(item: pytest.Item) -> str:
    """A test's name without its case."""
    return item.nodeid.partition("[")[0]


def _is_chosen_from(item: pytest.Item) -> bool:
    return Path(of_file(item.nodeid)).parts[1:2] in _CHOSEN_FROM


def _is_habit(item: pytest.Item) -> bool:
    return Path(of_file(item.nodeid)).parts[1:3] == ("cluster", "habits")
