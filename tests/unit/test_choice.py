"""Which tests `make test` runs."""

from __future__ import annotations

from tests.support.choice import chosen


class Item:
    """What pytest has collected."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid = nodeid
        self.location = (nodeid.partition("::")[0], 0, "")
        self._marks = marks

    def get_closest_marker(self, name: str) -> bool:
        return name in self._marks


def names(items: object) -> list[str]:
    return [item.nodeid for item in items]  # type: ignore[attr-defined]


CLUSTER = [Item(f"tests/cluster/test_a.py::test_kill[{number}]") for number in range(7)]
UNIT = [Item(f"tests/unit/test_a.py::test_{number}") for number in range(5)]
OWN = [Item("tests/cluster/test_b.py::test_x[0]", "thorough"), Item("tests/cluster/test_b.py::test_x[1]")]


def test_of_many_like_cases_a_few_are_run() -> None:
    run, left_out = chosen([*CLUSTER, *UNIT, *OWN], ["tests"])  # type: ignore[list-item]
    assert names(run) == names([CLUSTER[0], CLUSTER[5], *UNIT, OWN[1]])
    assert names(left_out) == names([*CLUSTER[1:5], CLUSTER[6], OWN[0]])


def test_what_is_named_is_run() -> None:
    run, left_out = chosen([CLUSTER[1], OWN[0]], ["tests/cluster/test_a.py::test_kill"])  # type: ignore[list-item]
    assert names(run) == names([CLUSTER[1], OWN[0]])
    assert not left_out


HABITS = "tests/cluster/habits/test_a.py::"


def test_a_habit_is_run_in_half_of_the_tests_that_have_it() -> None:
    replicas = [Item(f"{HABITS}test_replicas[{habit}]") for habit in ("SAM", "clamp", "EMA")]
    pipeline = [Item(f"{HABITS}test_a_pipeline[{habit}]") for habit in ("SAM", "clamp")]
    alone = [Item(f"{HABITS}test_late"), Item(f"{HABITS}test_of_two")]
    run, left_out = chosen([*replicas, *pipeline, *alone], ["tests"])  # type: ignore[list-item]
    assert names(run) == names([replicas[0], replicas[2], pipeline[1], *alone])
    assert names(left_out) == names([replicas[1], pipeline[0]])
