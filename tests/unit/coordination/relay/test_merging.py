"""When events are passed on: with all that a phase expects, with an urgent one, or after a linger."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swift_ft.coordination.relay.merging import (
    LINGER_S,
    LONGEST_LINGER_S,
    LONGEST_LOSSES_LINGER_S,
    LOSSES_LINGER_S,
    PARTS_LINGER_S,
    Merging,
)
from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Stamped
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step
from tests.support.clock import Clock

MACHINES = 4


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def agreeing() -> State:
    """Four machines with two workers each, in the first generation."""
    state = step(State(), ev.JobOpened(machines=MACHINES, workers_per_machine=2))
    for slot in range(MACHINES):
        state = step(state, ev.MachineJoined(machine=f"m{slot}", address=f"m{slot}:1"))
    assert state.phase == Phase.AGREEING
    return state


def stamped(*events: ev.Event, origin: str = "o", first: int = 1) -> list[Stamped]:
    return [Stamped(event, 0.0, origin, origin, serial) for serial, event in enumerate(events, first)]


def report(rank: int, generation: int = 1) -> ev.StatusReported:
    return ev.StatusReported(rank=rank, generation=generation, iteration=None)


def persisted(rank: int, iteration: int = 3) -> ev.PartPersisted:
    return ev.PartPersisted(rank=rank, iteration=iteration, epoch=0, generation=1, path="p")


def test_nothing_is_due_where_nothing_is_held(clock: Clock, agreeing: State) -> None:
    assert Merging(clock).due_at(agreeing, range(2)) == math.inf


def test_reports_are_held_until_the_last_one_of_the_group(clock: Clock, agreeing: State) -> None:
    merging, slots = Merging(clock), range(2)
    for rank in range(3):
        merging.hold(agreeing, stamped(report(rank), origin=f"o{rank}"))
        assert merging.due_at(agreeing, slots) == clock.now + LINGER_S
    merging.hold(agreeing, stamped(report(3), origin="o3"))
    assert merging.due_at(agreeing, slots) <= clock.now
    assert [s.event.rank for s in merging.take()] == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert merging.due_at(agreeing, slots) == math.inf


def test_those_that_the_state_has_are_not_waited_for(clock: Clock, agreeing: State) -> None:
    merging = Merging(clock)
    for rank in range(3):
        agreeing = step(agreeing, report(rank))
    merging.hold(agreeing, stamped(report(3)))
    assert merging.due_at(agreeing, range(2)) <= clock.now


def test_what_another_relay_passes_on_meanwhile_is_not_waited_for(clock: Clock, agreeing: State) -> None:
    merging = Merging(clock)
    merging.hold(agreeing, stamped(report(0), report(1), report(2)))
    assert merging.due_at(agreeing, range(2)) > clock.now
    assert merging.due_at(step(agreeing, report(3)), range(2)) <= clock.now


def test_a_linger_begins_anew_with_each_event_but_ends_in_time(clock: Clock, agreeing: State) -> None:
    merging, latest = Merging(clock), clock.now + LONGEST_LINGER_S
    for serial in range(1, 20):
        merging.hold(agreeing, stamped(report(0), first=serial))
        assert merging.due_at(agreeing, range(2)) == min(clock.now + LINGER_S, latest)
        clock.now += LINGER_S / 2
    assert clock.now > latest
    merging.take()
    merging.hold(agreeing, stamped(report(1)))
    assert merging.due_at(agreeing, range(2)) == clock.now + LINGER_S


def test_an_urgent_event_takes_along_what_is_held_and_keeps_the_order(clock: Clock, agreeing: State) -> None:
    merging = Merging(clock)
    merging.hold(agreeing, stamped(report(0)))
    merging.hold(agreeing, stamped(ev.MachineLost(machine="m3", reason="?"), first=2))
    assert merging.due_at(agreeing, range(4)) == -math.inf
    assert [s.serial for s in merging.take()] == [1, 2]


def after_a_loss(agreeing: State) -> State:
    lost = step(agreeing, ev.MachineLost(machine="m3", reason="?"))
    joined = step(lost, ev.MachineJoined(machine="m4", address="m4:1"))
    assert joined.generation == 2
    return joined


def test_a_loss_that_the_state_knows_hurries_nobody(clock: Clock, agreeing: State) -> None:
    merging, slots, joined = Merging(clock), range(2), after_a_loss(agreeing)
    merging.hold(joined, stamped(ev.MachineLost(machine="m3", reason="?", reporter="m1")))
    assert merging.due_at(joined, slots) == clock.now + LINGER_S
    merging.hold(joined, stamped(report(0, generation=2), origin="o1"))
    assert merging.due_at(joined, slots) == clock.now + LINGER_S
    merging.hold(joined, stamped(ev.MachineLost(machine="m2", reason="?", reporter="m1"), first=2))
    assert merging.due_at(joined, slots) == -math.inf


def test_the_last_relay_of_a_large_job_waits_for_the_rest_of_a_rack(clock: Clock, agreeing: State) -> None:
    losses = [ev.MachineLost(machine=f"m{slot}", reason="?") for slot in (1, 2, 3)]
    merging, slots, latest = Merging(clock, fanout=2), range(4), clock.now + LONGEST_LOSSES_LINGER_S
    for serial, loss in enumerate(losses, 1):
        merging.hold(agreeing, stamped(loss, first=serial), is_last=True)
        assert merging.due_at(agreeing, slots) == min(clock.now + LOSSES_LINGER_S, latest)
        clock.now += 3 * LONGEST_LOSSES_LINGER_S / 4
    assert [s.event.machine for s in merging.take()] == ["m1", "m2", "m3"]  # type: ignore[union-attr]
    merging.hold(agreeing, stamped(losses[0]))  # a relay on the way
    assert merging.due_at(agreeing, slots) == -math.inf
    small = Merging(clock, fanout=MACHINES)
    small.hold(agreeing, stamped(losses[0]), is_last=True)
    assert small.due_at(agreeing, slots) == -math.inf


def test_what_belongs_to_a_generation_that_is_over_is_held_no_longer(clock: Clock, agreeing: State) -> None:
    merging = Merging(clock)
    merging.hold(agreeing, stamped(ev.WorkerReady(rank=0, generation=1)))
    assert merging.due_at(after_a_loss(agreeing), range(2)) <= clock.now


def test_reports_that_count_on_are_held_with_those_of_the_next_generation(
    clock: Clock, agreeing: State
) -> None:
    merging, joined = Merging(clock), after_a_loss(agreeing)
    merging.hold(agreeing, stamped(report(0), report(1)))
    assert merging.due_at(joined, range(2)) == clock.now + LINGER_S
    merging.hold(agreeing, stamped(report(2, generation=2), report(3, generation=2), origin="o2"))
    assert merging.due_at(joined, range(2)) <= clock.now


def test_a_report_of_a_generation_that_is_still_to_come_lingers(clock: Clock, agreeing: State) -> None:
    """The worker has read a block that its agent has not stepped through yet."""
    merging = Merging(clock)
    merging.hold(agreeing, stamped(report(0, generation=2)))
    assert merging.due_at(agreeing, range(2)) == clock.now + LINGER_S


def test_parts_of_a_checkpoint_linger_for_longer(clock: Clock, agreeing: State) -> None:
    merging, live = Merging(clock), replace(agreeing, phase=Phase.LIVE)
    merging.hold(agreeing, stamped(persisted(0), persisted(1), persisted(2)))
    assert merging.due_at(live, range(2)) == clock.now + PARTS_LINGER_S
    merging.hold(agreeing, stamped(persisted(3), origin="o3"))
    assert merging.due_at(live, range(2)) <= clock.now


def test_of_two_checkpoints_both_must_be_complete(clock: Clock, agreeing: State) -> None:
    merging, live = Merging(clock), replace(agreeing, phase=Phase.LIVE)
    merging.hold(agreeing, stamped(persisted(0), persisted(1), persisted(0, 6)))
    assert merging.due_at(live, range(1)) > clock.now
    merging.hold(agreeing, stamped(persisted(1, 6), origin="o1"))
    assert merging.due_at(live, range(1)) <= clock.now


def test_machines_without_a_slot_hold_nothing_back(clock: Clock, agreeing: State) -> None:
    merging = Merging(clock)
    merging.hold(agreeing, stamped(report(0)))
    assert merging.due_at(agreeing, range(0)) <= clock.now


def forming(machines: int, spares: int) -> State:
    state = step(State(), ev.JobOpened(machines=machines))
    for number in range(spares):
        state = step(state, join(number))
    assert state.phase == Phase.FORMING
    return state


def join(number: int) -> ev.MachineJoined:
    return ev.MachineJoined(machine=f"m{number}", address=f"m{number}:1")


def test_joins_are_held_until_all_machines_are_there(clock: Clock) -> None:
    merging, state = Merging(clock, fanout=2), forming(4, 1)
    merging.hold(state, stamped(join(1), join(2)))
    assert merging.due_at(state, range(0)) == clock.now + LINGER_S
    merging.hold(state, stamped(join(3), first=3))
    assert merging.due_at(state, range(0)) == -math.inf
    assert len(merging.take()) == 3
    assert merging.due_at(state, range(0)) == math.inf


def test_joins_that_others_have_passed_on_count_as_well(clock: Clock) -> None:
    merging = Merging(clock, fanout=2)
    merging.hold(forming(4, 1), stamped(join(1)))
    assert merging.due_at(forming(4, 2), range(0)) > clock.now
    assert merging.due_at(forming(4, 3), range(0)) == -math.inf


@pytest.mark.parametrize("why", ["a job without heads", "the last one", "a recovery"])
def test_a_join_that_someone_waits_for_is_urgent(why: str, clock: Clock, agreeing: State) -> None:
    merging = Merging(clock, fanout=32 if why == "a job without heads" else 2)
    states = {
        "a job without heads": forming(4, 1),
        "the last one": forming(4, 3),
        "a recovery": step(agreeing, ev.MachineLost(machine="m3", reason="?")),
    }
    merging.hold(states[why], stamped(join(9)))
    assert merging.due_at(states[why], range(0)) == -math.inf
