"""Pauses that the job has ordered itself, and until when a job with an empty slot waits for their end."""

from __future__ import annotations

import math
from functools import reduce

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.pauses import Returns, pauses_of
from swift_ft.recovery.protocol import step
from tests.unit.recovery.test_orders import OPENED, failed_newcomers, joined, lost
from tests.unit.recovery.test_recoveries import report

OUTAGE = tuple(f"m.{number}" for number in range(6))
"""A machine's newcomers, of which the last one stays away for longest."""


def silenced(times: int) -> State:
    """One of two machines, which was lost by silence so often, and no other one is there."""
    events: list[ev.Event] = [OPENED, joined("good.0")]
    for number in range(times):
        events += [joined(f"m.{number}"), lost(f"m.{number}", "good.0")]
    return reduce(step, events, State())


def test_a_job_without_such_losses_waits_for_nobody() -> None:
    assert pauses_of(State()) == {}
    assert pauses_of(failed_newcomers("m.0")) == {}
    assert Returns().last_at(State(), 5.0) == -math.inf


def test_pauses_are_those_of_machines_that_were_told_to_stay_away() -> None:
    assert pauses_of(failed_newcomers(*OUTAGE)) == {("m", 6): 160.0}
    state = silenced(3)
    assert state.phase == Phase.FORMING
    assert pauses_of(state) == {("m", 3): 20.0}
    assert pauses_of(step(state, joined("m.3"))) == {}, "it is back"


def test_a_machine_that_left_on_request_is_not_waited_for() -> None:
    left = ev.MachineLost(machine="m.3", reason="it was drained", on_request=True)
    assert pauses_of(step(step(silenced(3), joined("m.3")), left)) == {}


def test_a_host_takes_its_next_guest_after_a_pause() -> None:
    events: list[ev.Event] = [OPENED, joined("A.0"), joined("B.0")]
    state = reduce(step, [*events, *(report(rank, 1, None) for rank in (0, 1))], State())
    state = step(state, lost("B.0", ""))
    for guest in ("G.0", "H.0"):
        state = step(state, ev.MachineJoined(machine=guest, host="A.0", preferred_slot=1))
        failed = ev.ScriptFailed(
            machine=guest, started_in=state.generation, reason="HTTP Error 503", cause="network"
        )
        state = step(state, failed)
    assert pauses_of(state) == {("A", 2): 10.0}


def test_a_pause_counts_from_the_loss_and_once() -> None:
    returns, state = Returns(), silenced(3)
    assert returns.last_at(state, 100.0) == 120.0
    assert (returns.machines(after=119.0), returns.machines(after=120.0)) == (["m"], [])
    later = step(state, ev.MachineJoined(machine="n.0"))
    for now in (110.0, 500.0):
        assert returns.last_at(state, now) == returns.last_at(later, now) == 120.0
    assert returns.last_at(silenced(4), 600.0) == 640.0, "it was lost once more"
    back = step(silenced(4), joined("m.4"))
    assert back.phase != Phase.FORMING
    assert returns.last_at(back, 610.0) == -math.inf


def test_a_pause_counts_also_once_its_machine_is_back() -> None:
    """Or the run would end at that moment: others are missing, who have had no time but the pause."""
    returns, state = Returns(), silenced(3)
    state = step(step(state, joined("m.3")), lost("good.0", ""))
    assert state.phase == Phase.FORMING
    assert returns.last_at(silenced(3), 100.0) == 120.0
    assert returns.last_at(state, 120.0) == 120.0


def test_a_machine_that_is_lost_again_and_again_holds_up_the_end_for_an_hour_at_most() -> None:
    returns, now = Returns(), 0.0
    returns.last_at(State(), now)
    for times in range(3, 20):
        now = returns.last_at(silenced(times), now)
    assert now == 3600.0
