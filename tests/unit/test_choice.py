"""Which tests `make test` runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import date, timedelta
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

from tests.support.choice import TURNS, chosen, in_order_of_files, overdue, turn_of, turn_on
from tests.support.durations import DURATIONS, SLOW_S, durations_in, of_file

CLUSTER, STORES = "tests/cluster/test_a.py", "tests/stores/test_a.py"
HABITS = "tests/cluster/habits/test_a.py"


class Item:
    """What pytest has collected."""

    def __init__(self, file: str, function: str, *marks: str, **values: object) -> None:
        case = f"[{'-'.join(str(value) for value in values.values())}]" if values else ""
        self.nodeid = f"{file}::{function}{case}"
        self.location = (file, 0, "")
        self._marks = marks
        if values:
            self.callspec = SimpleNamespace(params=values)

    def get_closest_marker(self, name: str) -> bool:
        return name in self._marks


def names(items: Sequence[Any]) -> list[str]:
    return [item.nodeid for item in items]


def all_of(items: Sequence[Item], each_s: float = 1.0) -> dict[str, float]:
    """Each test was measured, and took as long as all others."""
    return dict.fromkeys(names(items), each_s)


def run_of(
    items: Sequence[Item],
    durations: Mapping[str, float],
    *,
    budget_s: float,
    failed: Collection[str] = (),
    named: Sequence[str] = ("tests",),
    turn: int | None = None,
) -> list[str]:
    """The names of the tests that are run. All others are left out, each in its place."""
    run, left_out = chosen(
        items,  # type: ignore[arg-type]
        named,
        durations=durations,
        failed=failed,
        budget_s=budget_s,
        turn=turn,
    )
    assert names(run) == [name for name in names(items) if name in names(run)]
    assert names(left_out) == [name for name in names(items) if name not in names(run)]
    return names(run)


KILLS = [Item(CLUSTER, "test_kill", point=point, machine=m) for point, m in product("abc", (0, 1))]
PLAIN = [Item(CLUSTER, "test_plain"), Item(STORES, "test_plain")]


def test_each_function_is_run_whatever_it_takes() -> None:
    durations = all_of([*KILLS, *PLAIN], 100) | {KILLS[3].nodeid: 99}
    assert run_of([*KILLS, *PLAIN], durations, budget_s=0) == names([KILLS[3], *PLAIN])


def test_values_come_before_pairs_of_values() -> None:
    """Three cases have all values of both parameters. Only then come cases whose values others have had."""
    durations = all_of(KILLS)
    run = run_of(KILLS, durations, budget_s=3)
    assert {name.partition("[")[2][0] for name in run} == {*"abc"}
    assert {name[-2] for name in run} == {"0", "1"}
    assert len(run) == 3
    assert len(run_of(KILLS, durations, budget_s=5)) == 5
    assert run_of(KILLS, durations, budget_s=6) == names(KILLS)


def test_the_cheapest_case_that_has_a_value_is_run() -> None:
    cases = [Item(CLUSTER, "test_x", value=value, slow=slow) for value in "abc" for slow in (True, False)]
    durations = {case.nodeid: 10.0 if "True" in case.nodeid else 1.0 for case in cases}
    assert run_of(cases, durations, budget_s=9) == names(cases[1::2])


def test_a_case_that_does_not_fit_makes_room_for_a_cheaper_one() -> None:
    cases = [
        Item(CLUSTER, "test_x", first=1, second=2, third=3),
        *(Item(CLUSTER, "test_y", x=x) for x in "ab"),
    ]
    durations = {cases[0].nodeid: 1.0, cases[1].nodeid: 1.0, cases[2].nodeid: 50.0}
    more = [
        Item(CLUSTER, "test_x", first=4, second=5, third=6),
        Item(CLUSTER, "test_x", first=1, second=7, third=3),
    ]
    durations |= {more[0].nodeid: 30.0, more[1].nodeid: 20.0}  # 3 values in 30 s come first
    assert run_of([*cases, *more], durations, budget_s=52) == names([*cases[:2], more[0], more[1]])
    assert run_of([*cases, *more], durations, budget_s=22) == names([*cases[:2], more[1]])


def test_what_is_new_is_run() -> None:
    durations = all_of(KILLS)
    del durations[KILLS[4].nodeid]
    run = run_of(KILLS, durations, budget_s=0)
    assert run == names([KILLS[4]])  # it is the case that the function must have, too


def test_what_failed_is_run_until_it_passes() -> None:
    failed = {KILLS[2].nodeid, KILLS[5].nodeid}
    assert run_of(KILLS, all_of(KILLS), budget_s=0, failed=failed) == sorted(failed)


def test_what_must_run_is_paid_from_the_budget() -> None:
    failed = [name for name in names(KILLS) if "[a" in name or "[b" in name]
    assert run_of(KILLS, all_of(KILLS), budget_s=4.5, failed=failed) == failed
    assert len(run_of(KILLS, all_of(KILLS), budget_s=5.5, failed=failed)) == 5


def test_thorough_tests_stay_out_even_if_they_are_new_or_failed() -> None:
    cases = [Item(CLUSTER, "test_x", x=0), Item(CLUSTER, "test_x", "thorough", x=1)]
    alone = Item(CLUSTER, "test_y", "thorough")
    run = run_of([*cases, alone], all_of(cases[:1]), budget_s=9, failed=[alone.nodeid])
    assert run == names(cases[:1])


def test_all_tests_of_one_process_are_run() -> None:
    unit = [Item("tests/unit/test_a.py", "test_x", x=x) for x in range(5)]
    assert run_of(unit, all_of(unit, 100), budget_s=0) == names(unit)


def test_what_is_named_is_run() -> None:
    cases = [KILLS[1], Item(CLUSTER, "test_x", "thorough")]
    assert run_of(cases, all_of(cases), budget_s=0, named=[f"{CLUSTER}::test_kill"]) == names(cases)


def test_each_habit_is_run_in_the_quickest_of_the_tests_that_have_it() -> None:
    replicas = [Item(HABITS, "test_replicas", habit=habit) for habit in ("SAM", "clamp", "EMA")]
    pipeline = [Item(HABITS, "test_a_pipeline", habit=habit) for habit in ("SAM", "clamp")]
    alone = [Item(HABITS, "test_late"), Item(HABITS, "test_of_two")]
    habits = [*replicas, *pipeline, *alone]
    durations = all_of(habits) | {replicas[0].nodeid: 3.0}
    assert run_of(habits, durations, budget_s=0) == names([*replicas[1:], pipeline[0], *alone])
    assert run_of(habits, durations, budget_s=6) == names([*replicas[1:], *pipeline, *alone])
    assert run_of(habits, durations, budget_s=9) == names(habits)


def test_a_habit_of_one_file_is_not_that_of_another() -> None:
    one, other = Item(HABITS, "test_x", habit="SAM"), Item(HABITS.replace("_a", "_b"), "test_x", habit="SAM")
    assert run_of([one, other], all_of([one, other]), budget_s=0) == names([one, other])


MANY = [Item(CLUSTER, f"test_{number}") for number in range(60)]


def test_functions_take_turns() -> None:
    """Each has its own, the same in all processes, and about as many have each."""
    turns = [run_of(MANY, all_of(MANY), budget_s=0, turn=turn) for turn in range(TURNS)]
    assert sorted(chain(*turns)) == sorted(names(MANY))
    assert all(len(turn) > len(MANY) / TURNS / 2 for turn in turns)
    assert turns[1] == [name for name in names(MANY) if turn_of(name) == 1]


def test_turns_follow_one_another_day_by_day() -> None:
    days = [date(2027, 12, 30) + timedelta(days=number) for number in range(4)]
    assert [(turn_on(day) - turn_on(days[0])) % TURNS for day in days] == [0, 1, 2, 0]


def test_what_is_new_or_failed_needs_no_turn() -> None:
    first, other = MANY[0].nodeid, MANY[1].nodeid
    durations = all_of(MANY)
    del durations[first]
    turn = (turn_of(other) + 1) % TURNS
    run = run_of(MANY[:2], durations, budget_s=0, failed=[other], turn=turn)
    assert run == [first, other]


def test_a_file_that_is_named_needs_no_turn() -> None:
    other = [Item(CLUSTER.replace("_a", "_b"), f"test_{number}") for number in range(9)]
    items = [*MANY, *other]
    run = run_of(items, all_of(items), budget_s=0, named=["tests/stores", f"./{CLUSTER}"], turn=0)
    assert run[: len(MANY)] == names(MANY)
    assert len(run) < len(items)


def test_slow_tests_of_one_process_take_turns() -> None:
    unit = [Item("tests/unit/host/test_a.py", "test_x", x=x) for x in range(60)]
    quick = SLOW_S - 0.1  # has no duration, as a rule
    durations = all_of(unit[:30], SLOW_S) | all_of(unit[30:45], quick)
    turns = [run_of(unit, durations, budget_s=0, turn=turn) for turn in range(TURNS)]
    assert all(turn[-30:] == names(unit[30:]) for turn in turns)
    assert sorted(chain(*(turn[:-30] for turn in turns))) == sorted(names(unit[:30]))
    assert all(len(turn) < 50 for turn in turns)
    assert len(run_of(unit, durations, budget_s=0, turn=0, failed=names(unit))) == 60


def test_what_holds_the_house_in_order_needs_no_turn() -> None:
    """Any change may break it."""
    unit = [Item("tests/unit/test_a.py", "test_x", x=x) for x in range(30)]
    for turn in range(TURNS):
        assert run_of(unit, all_of(unit, SLOW_S), budget_s=0, turn=turn) == names(unit)


def test_what_has_not_passed_for_a_week_is_due_and_the_oldest_first() -> None:
    thorough = Item(CLUSTER, "test_x", "thorough")
    unit = Item("tests/unit/test_a.py", "test_x")
    items: list[Any] = [*KILLS, thorough, unit]
    days = [date(2026, 11, 28) - timedelta(days=ago) for ago in (3, 6, 7, 9, 8, 400)]
    last = dict(zip(names(KILLS), map(str, days), strict=True))

    def due(budget_s: float) -> list[str]:
        run, left_out = overdue(items, last, all_of(items), budget_s=budget_s, today=date(2026, 11, 28))
        assert sorted(names(run) + names(left_out)) == sorted(names(items))
        return names(run)

    assert due(9) == names([*KILLS[2:], thorough])
    assert due(2) == names([KILLS[5], thorough])  # this one has never run
    assert due(0) == []


def test_long_files_are_first_and_stores_last_and_tests_of_a_file_stay_in_order() -> None:
    one, other = Item("tests/cluster/test_b.py", "test_x"), Item("tests/cluster/test_c.py", "test_x")
    store = Item("tests/stores/test_b.py", "test_x")
    items = [one, PLAIN[1], *KILLS, other, store]
    durations = all_of(KILLS, 2) | {other.nodeid: 11.0, PLAIN[1].nodeid: 13.0, store.nodeid: 14.0}
    ordered = in_order_of_files(items, durations)  # type: ignore[arg-type]
    assert names(ordered) == names([*KILLS, other, one, store, PLAIN[1]])


def test_durations_are_those_of_files_that_are_there() -> None:
    """Else the tests of a file that was renamed are new, and all are run: rename it in the durations, too."""
    files = {of_file(test) for test in durations_in()}
    assert files
    assert not [file for file in files if not (DURATIONS.parents[1] / file).exists()]
