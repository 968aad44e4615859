"""Orders that follow from the state: here, those of machines that others lose sight of."""

from __future__ import annotations

from functools import reduce

import pytest

from swift_ft.recovery import events as ev
from swift_ft.recovery.attempts import MAX_WAITS
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WATCHED_EACH, AgentTodo, agent_order, neighbours_of
from swift_ft.recovery.protocol import step
from tests.unit.recovery.test_recoveries import report

OPENED = ev.JobOpened(machines=2, workers_per_machine=1, restarts=0, max_failures=None)


def joined(name: str) -> ev.MachineJoined:
    return ev.MachineJoined(machine=name, preferred_slot=None, address=f"{name}:1")


def lost(name: str, reporter: str, cause: str = "") -> ev.MachineLost:
    return ev.MachineLost(machine=name, reason="its agent cannot be reached", reporter=reporter, cause=cause)


def after_losses(count: int, reporter: str = "good.0", cause: str = "") -> State:
    """Machine ``m`` was lost so often, as a spare that joined again each time."""
    events: list[ev.Event] = [OPENED, joined("good.0"), joined("other.0")]
    for incarnation in range(count):
        events += [joined(f"m.{incarnation}"), lost(f"m.{incarnation}", reporter, cause)]
    return reduce(step, events, State())


@pytest.mark.parametrize(
    ("losses", "wait_s"), [(1, 0), (2, 10), (3, 20), (6, 160), (7, 300), (30, 300), (2000, 300)]
)
def test_a_machine_that_others_lose_sight_of_stays_away_for_longer_and_longer(
    losses: int, wait_s: float
) -> None:
    order = agent_order(after_losses(losses), machine=f"m.{losses - 1}", started_in=None)
    assert (order.todo, order.wait_s) == (AgentTodo.REJOIN, wait_s)


def test_a_machine_whose_workers_end_by_their_own_errors_joins_again_at_once() -> None:
    state = after_losses(9, reporter="", cause="native code")
    assert agent_order(state, machine="m.8", started_in=None).wait_s == 0


def failed_newcomers(*names: str, cause: str = "network") -> State:
    """One after the other they were to replace a lost machine."""
    opened: list[ev.Event] = [OPENED, joined("good.0"), joined("other.0")]
    reports = [report(rank, 1, None) for rank in (0, 1)]
    saved = ev.CheckpointCommitted(iteration=5, epoch=1)
    state = reduce(step, [*opened, *reports, saved, lost("other.0", "")], State())
    for name in names:
        state = step(state, joined(name))
        failed = ev.ScriptFailed(
            machine=name, started_in=state.generation, reason="HTTP Error 503", cause=cause
        )
        state = step(state, failed)
        assert name in state.membership.fenced
    return state


def test_newcomers_wait_for_longer_and_longer_for_what_passes() -> None:
    """Also one that comes for the first time: it would meet the same server."""
    state = failed_newcomers("m.0", "m.1", "m.2", "n.0", "m.3")
    waits = [agent_order(state, machine=name, started_in=None).wait_s for name in ("n.0", "m.3")]
    assert waits == [20, 40]
    assert agent_order(failed_newcomers("m.0"), machine="m.0", started_in=None).wait_s == 0
    state = failed_newcomers("m.0", cause="script")
    assert not state.tries.attempts.waits
    state = failed_newcomers(*(f"m.{number}" for number in range(MAX_WAITS)))
    assert agent_order(state, machine=f"m.{MAX_WAITS - 1}", started_in=None).wait_s == 0, "it is given up"


def test_spares_that_fail_one_after_the_other_have_waited_for_nothing() -> None:
    """Each has its own pauses. Seven failures within seconds are no outage of five minutes."""
    spares = [f"{name}.0" for name in "klmnopqr"]
    assert len(spares) > MAX_WAITS
    state = failed_newcomers(*spares, "k.1", "l.1")
    waits = [agent_order(state, machine=name, started_in=None).wait_s for name in ("r.0", "k.1", "l.1")]
    assert waits == [0, 10, 10]
    assert state.tries.attempts.may_wait


def test_once_all_train_nobody_waits_for_what_has_passed() -> None:
    state = failed_newcomers("m.0", "m.1", "m.2")
    assert agent_order(state, machine="m.2", started_in=None).wait_s == 20
    state = step(state, joined("n.0"))
    for rank, at in enumerate((7, None)):
        state = step(state, report(rank, state.generation, at))
    state = step(state, ev.WorkerReady(rank=1, generation=state.generation))
    assert state.phase == Phase.LIVE
    assert agent_order(state, machine="m.2", started_in=None).wait_s == 0


def often_lost(name: str, times: int, domain: str = "") -> list[ev.Event]:
    """A machine that fills a slot, and is lost by its own report, again and again."""
    events: list[ev.Event] = []
    for number in range(times):
        events.append(ev.MachineJoined(machine=f"{name}.{number}", domain=domain))
        events.append(lost(f"{name}.{number}", ""))
    return events


@pytest.mark.parametrize(("times", "wait_s"), [(2, 0), (3, 10), (4, 20)])
def test_a_machine_that_is_lost_often_comes_back_at_once_only_while_it_is_needed(
    times: int, wait_s: float
) -> None:
    state = reduce(step, [OPENED, joined("a.0"), *often_lost("m", times)], State())
    machine = f"m.{times - 1}"
    assert agent_order(state, machine=machine, started_in=None).wait_s == 0
    state = step(state, joined("c.0"))
    assert None not in state.members
    assert agent_order(state, machine=machine, started_in=None).wait_s == wait_s


def test_machines_of_a_domain_that_is_lost_often_wait_behind_all_others() -> None:
    rack = [*often_lost("m", 2, "rack"), *often_lost("n", 2, "rack")]
    state = reduce(step, [OPENED, joined("a.0"), *rack, joined("c.0")], State())
    spare = ev.MachineJoined(machine="o.0", domain="rack")
    assert step(step(state, spare), joined("p.0")).membership.waiting() == ["p.0", "o.0"]
    # Both losses were of one machine: the others of its rack are as good as any.
    once = reduce(step, [OPENED, joined("a.0"), *often_lost("m", 2, "rack"), joined("c.0")], State())
    assert step(step(once, spare), joined("p.0")).membership.waiting() == ["o.0", "p.0"]


@pytest.mark.parametrize("located", [True, False])
def test_a_machine_whose_late_worker_says_where_it_is_works(located: bool) -> None:
    began: list[ev.Event] = [OPENED, joined("a.0"), joined("b.0"), joined("c.0")]
    state = reduce(step, began, State())
    for number in range(3):
        name = "b.0" if number == 0 else f"c.{number - 1}"
        late = ev.DeadlinePassed(
            generation=state.generation,
            phase=state.phase,
            machines=(name,),
            reason="no answer",
            located=(name,) if located else (),
        )
        state = step(step(state, joined(f"c.{number + 1}")), late)
        assert name in state.membership.fenced
    counted = {identity: losses.count for identity, losses in state.membership.losses.items()}
    assert counted == ({} if located else {"b": 1, "c": 2})


def test_two_reports_of_one_loss_count_once() -> None:
    state = step(after_losses(1), lost("m.0", "other.0"))
    assert state.membership.silenced["m"] == 1


def test_a_commit_with_the_machine_forgets() -> None:
    """All its workers have saved their part, so all others reach it."""
    state = step(step(after_losses(3), joined("m.3")), lost("other.0", ""))
    assert state.slot_of("m.3") is not None
    assert step(state, ev.CheckpointCommitted(iteration=5, epoch=0)).membership.silenced.get("m") is None
    assert step(after_losses(3), ev.CheckpointCommitted(iteration=5, epoch=0)).membership.silenced["m"] == 3


def test_more_losses_may_follow_one_by_silence() -> None:
    """Only where a spare opens the next generation at once: later all are known."""
    trained: list[ev.Event] = [OPENED, joined("a.0"), joined("b.0"), joined("c.0"), joined("d.0")]
    state = reduce(step, trained, State())
    silent = ev.MachineLost(machine="a.0", reason="silent", reporter="b.0", silent=True)
    assert step(state, silent).round.after_silence
    assert not step(state, lost("a.0", "b.0")).round.after_silence
    alone = reduce(step, trained[:3], State())
    assert not step(alone, silent).round.after_silence
    assert not step(step(alone, silent), joined("e.0")).round.after_silence


def test_each_machine_watches_the_next_few_of_a_ring() -> None:
    ring = {name: f"{name}:1" for name in "dbeac"}
    assert WATCHED_EACH == 3
    assert neighbours_of("a", ring) == ("b", "c", "d")
    assert neighbours_of("d", ring) == ("e", "a", "b")
    assert neighbours_of("e", ring) == ("a", "b", "c")
    watched = [name for machine in ring for name in neighbours_of(machine, ring)]
    assert sorted(watched) == sorted([*ring] * WATCHED_EACH)


def test_small_rings() -> None:
    assert neighbours_of("b", {"a": "", "b": "", "c": ""}) == ("c", "a")
    assert neighbours_of("b", {"a": "", "b": ""}) == ("a",)
    assert neighbours_of("b", {"b": ""}) == ()
    assert neighbours_of("x", {"a": "", "b": ""}) == ()
