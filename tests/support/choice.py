"""Which tests `make test` runs, by what they show and how long they take.

Tests of whole clusters and of stores are many and slow: all their cases take hours. Their durations are
measured (`tests/durations.json`), and the choice has a budget, in seconds of tests. Slow tests take turns:
three days have all of them. These run, whatever they take:

- of the test functions whose turn it is one case each, and of the habits of scripts (`tests/cluster/habits`)
  each in one of the tests that have it;
- what is new, and so has no duration yet: nobody knows whether it passes;
- what failed in the last run here, until it passes (pytest's cache says so).

What is left of the budget is spent on cases that add most in a second: first on values of parameters that no
chosen case of their function has, then on pairs of values that none has together.

Tests of one process that take over three seconds take turns, too. All others run each time, and so do those
that lie in `tests/unit` itself: any change can break what they hold, the house's order and its pages.

What is new or failed lately is all that counts as a risk. No subject is preferred: nothing that was measured
says of which subjects the tests fail more often.

Tests that are marked as thorough stay out; `--thorough` runs all (`make test-all`). A test that is named on
the command line is run anyway, and one whose file is named needs no turn. The choice depends on the tests,
their durations, the last failures and the turn alone, so that all processes of a run make the same one.

`--due` chooses otherwise: of all cases, those that have not passed for longest (`make test-due`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from datetime import date, timedelta
from heapq import heapify, heappop, heapreplace
from itertools import combinations
from pathlib import Path
from zlib import crc32

import pytest

from tests.support.durations import SLOW_S, of_file

MARK = "thorough"
BUDGET_S = 1200
"""Seconds of tests of clusters and stores that are run by default: ten minutes of two workers.

One case of each function and habit takes three times as many.
"""
TURNS = 3
WEEK = timedelta(days=7)
_UNKNOWN_S = 20.0
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
    turn: int | None = None,
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, and those to leave out.

    Args:
        items: all that were collected.
        named: the arguments of the command line.
        durations: seconds by test. A test that is not among them is new.
        failed: tests that failed when they were last run.
        budget_s: seconds of tests to choose. All kinds of cases whose turn it is are run even if these take
            longer.
        turn: 0, 1 or 2: whose turn it is. None: everyone's.
    """
    all_items = [*items]
    if any("::" in name for name in named):
        return all_items, []

    def waits(item: pytest.Item, what: Hashable) -> bool:
        """Whether it is not the turn of something."""
        file = of_file(item.nodeid)
        return turn is not None and turn_of(what) != turn and not any(name.endswith(file) for name in named)

    unmarked = [item for item in all_items if not item.get_closest_marker(MARK)]
    cases = [item for item in unmarked if _is_chosen_from(item)]
    taken = {case.nodeid for case in cases if case.nodeid not in durations or case.nodeid in failed}

    def kinds(case: pytest.Item) -> list[Hashable]:
        return [kind for kind in _kinds(case) if not waits(case, kind)]

    for shows, limit_s in ((kinds, math.inf), (_values, budget_s), (_pairs, budget_s)):
        _take(cases, taken, shows, durations, limit_s)
    left_out = {case.nodeid for case in cases} - taken
    slow = {item.nodeid for item in unmarked if durations.get(item.nodeid, 0) >= SLOW_S} - {*failed}
    left_out |= {
        item.nodeid
        for item in unmarked
        if item.nodeid in slow and _takes_turns(item) and waits(item, item.nodeid)
    }
    return _divided(all_items, {item.nodeid for item in unmarked} - left_out)


def overdue(
    items: Iterable[pytest.Item],
    last_runs: Mapping[str, str],
    durations: Mapping[str, float],
    *,
    budget_s: float,
    today: date,
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The cases of clusters and stores that have not passed for a week, the oldest first; and all others.

    Args:
        items: all that were collected.
        last_runs: the day on which each test passed last, as in 2026-11-28. What is not there never did.
        durations: seconds by test.
        budget_s: seconds of tests to choose.
        today: a week is counted from here.
    """
    all_items = [*items]
    limit = (today - WEEK).isoformat()
    cases = [case for case in all_items if _is_chosen_from(case) and last_runs.get(case.nodeid, "") <= limit]
    run: set[str] = set()
    for case in sorted(cases, key=lambda case: (last_runs.get(case.nodeid, ""), case.nodeid)):
        budget_s -= durations.get(case.nodeid, _UNKNOWN_S)
        if budget_s >= 0:
            run.add(case.nodeid)
    return _divided(all_items, run)


def turn_of(what: Hashable) -> int:
    """When something takes its turn, the same in all processes."""
    return crc32(repr(what).encode()) % TURNS


def turn_on(day: date) -> int:
    """Whose turn it is on a day."""
    return day.toordinal() % TURNS


def _divided(items: Sequence[pytest.Item], run: set[str]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those that run, and those that do not, in their order."""
    return [i for i in items if i.nodeid in run], [i for i in items if i.nodeid not in run]


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


def _takes_turns(item: pytest.Item) -> bool:
    """Whether a test of one process is one that may wait if it is slow."""
    return not _is_chosen_from(item) and Path(of_file(item.nodeid)).parent.parts != ("tests", "unit")


def _is_chosen_from(item: pytest.Item) -> bool:
    return Path(of_file(item.nodeid)).parts[1:2] in _CHOSEN_FROM


def _is_habit(item: pytest.Item) -> bool:
    return Path(of_file(item.nodeid)).parts[1:3] == ("cluster", "habits")
