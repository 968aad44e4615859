"""The larger world that machines make possible after losses, and the size that a job goes back to."""

from __future__ import annotations

import pytest

from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.regrowth import Growth, growth_of, missing_of
from swift_ft.recovery.requests import to_request
from swift_ft.recovery.snapshot import JournalSnapshot, snapshot_from_text, snapshot_to_text
from swift_ft.testing.scenario import Scenario
from tests.support.journals import ONE_REPLICA_LESS

SHARDS = """
    open 4 on-loss=shrink
    join A B C D
    report 0,2 nothing holds=s0
    report 1,3 nothing holds=s1
    committed 20
    lost B
    plan-change A C
    prepared all
    report 0,2 at 30 holds=s0
    report 3 at 30 holds=s1
    offered 0,2,3 at 30
    taken all
    report all at 30
"""
"""Two replicas of two shards: one is left, which shares nothing with anybody, and a machine waits."""


def after(*lines: str) -> State:
    scenario = Scenario()
    for line in "\n".join(lines).splitlines():
        scenario.run_line(line.strip())
    return scenario.state


def switched(change: str, at: int = 40) -> str:
    ranks = f"report all at {at} holds=m"
    return f"{change}\nprepared all\nrequest-switch 0 at {at}\noffered all at {at}\ntaken all\n{ranks}"


def test_a_machine_that_comes_fills_the_lost_slot() -> None:
    assert growth_of(after(ONE_REPLICA_LESS)) is None
    assert growth_of(after(ONE_REPLICA_LESS, "join E")) == Growth(("A", "E", "C", "D"))


def test_who_comes_first_is_taken_and_no_more_than_there_were() -> None:
    assert growth_of(after(ONE_REPLICA_LESS, "join E F")) == Growth(("A", "E", "C", "D"))


def test_as_many_as_are_allowed() -> None:
    state = after(
        ONE_REPLICA_LESS,
        "lost D\nplan-change A C\nprepared all\nreport 0,1 at 35 holds=m\noffered 0,1 at 35\ntaken all",
        "report all at 35 holds=m\njoin E F",
    )
    assert growth_of(state) == Growth(("A", "E", "C", "F"))
    assert growth_of(state, most=3) == Growth(("A", "E", "C"))
    assert growth_of(state, most=2) is None


@pytest.mark.parametrize(
    "line",
    [
        "plan-change A E C",  # a change is under way
        "request-shares 0 at 32 4,8,12",  # or a move of shares
        "drain C",  # somebody leaves first
        "drain E",
        "finished 0",
        "lost C",
    ],
)
def test_not_now(line: str) -> None:
    assert growth_of(after(ONE_REPLICA_LESS, "join E", line)) is None


def test_a_job_that_lost_nothing_does_not_grow() -> None:
    assert growth_of(after("open 2\njoin A B C\nreport all nothing holds=m")) is None


def test_shards_wait_for_a_whole_replica() -> None:
    """One of four is lost. The machine that has no shard now goes where it was, once another one comes."""
    state = after(SHARDS)
    assert state.membership.waiting() == ["D"]
    assert growth_of(state) is None
    assert growth_of(after(SHARDS, "join E")) == Growth(("A", "E", "C", "D"))
    assert to_request(state, "A") == (3,)


def test_the_layout_that_it_had_comes_back() -> None:
    planned = ONE_REPLICA_LESS.replace("lost B", switched("plan-change plan=dp=4 A B C D", 30) + "\nlost B")
    state = after(planned, "join E")
    assert state.worlds.present.plan == ""
    assert growth_of(state) == Growth(("A", "E", "C", "D"), plan="dp=4")


def test_it_has_its_full_size_again() -> None:
    state = after(ONE_REPLICA_LESS, "join E", switched("plan-change A E C D"))
    assert state.phase == Phase.LIVE
    assert state.worlds.full is None
    assert not missing_of(state)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ("plan-change A C E", 1),  # another machine
        ('plan-change A C D command="train.py --wide"', 1),  # another script
        ("plan-change A C", 0),  # another size
        ("plan-change A C D E", 0),  # the size that it had, with machines in other slots
        ("plan-change plan=dp=3 A C D", 0),  # another layout
    ],
)
def test_what_is_missed_after_a_change_on_purpose(change: str, missed: int) -> None:
    state = after(ONE_REPLICA_LESS, "join E", switched(change))
    assert state.phase == Phase.LIVE
    assert len(missing_of(state)) == missed


def test_a_snapshot_has_the_full_size() -> None:
    state = after(ONE_REPLICA_LESS, "join E", "plan-change A E C D")
    assert state.worlds.full is not None
    assert state.worlds.change is not None
    made = JournalSnapshot(state, Sequencer(), 0)
    assert snapshot_from_text(snapshot_to_text(made)) == made


def test_what_was_asked_for_before_the_smaller_world_is_not_asked_for_again() -> None:
    asked = ONE_REPLICA_LESS.replace("lost B", "lost B\nrequest-machines A 1")
    assert to_request(after(ONE_REPLICA_LESS), "A") == (3,)
    assert to_request(after(ONE_REPLICA_LESS), "C") == ()
    assert to_request(after(asked), "A") == ()
    # Once it has come, the next loss is another one.
    grown = switched("plan-change A E C D")
    assert to_request(after(asked, "join E", grown, "lost C"), "A") == (2,)


def test_nobody_asks_for_what_was_given_up_on_purpose() -> None:
    assert to_request(after(ONE_REPLICA_LESS, switched("plan-change A C")), "A") == ()
