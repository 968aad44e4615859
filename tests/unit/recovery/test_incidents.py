"""Incidents of runs that end in a recovery, and of recoveries that nobody has to look into."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swift_ft.cli.incident_words import incident_in_words
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause, cause_of
from swift_ft.recovery.entries import Entry, event_from_dict
from swift_ft.recovery.history import History
from swift_ft.recovery.incidents import ENDED, Incident
from swift_ft.recovery.job_state import Phase
from tests.support.recording_scenario import RecordingScenario
from tests.unit.recovery.test_recoveries import journal, report

SCENARIOS = Path(__file__).parents[2] / "scenarios"

RECOVERS = (ev.MachineJoined(machine="C"), report(0, 2, 7), report(1, 2, None))
KILLED = ev.MachineLost(machine="B", reason="B was killed", cause=Cause.SIGNAL)


def incidents(*events: ev.Event, max_failures: int | None = None) -> list[Incident]:
    """All of a job that trains, and then meets these events."""
    return History.of(trains(*events, max_failures=max_failures)).incidents


def trains(*events: ev.Event, max_failures: int | None = None) -> list[Entry]:
    """The journal of a job with two machines that restarts no script."""
    return journal(
        ev.JobOpened(machines=2, max_failures=max_failures),
        *(ev.MachineJoined(machine=m) for m in "AB"),
        *(report(rank, 1, None) for rank in range(2)),
        ev.CheckpointCommitted(iteration=5, epoch=1),
        *events,
    )


@pytest.mark.parametrize(
    ("last", "cause", "evidence", "machines"),
    [
        (
            ev.ScriptFailed(machine="A", started_in=1, reason="KeyError", cause="data", evidence=("a.py:1",)),
            Cause.DATA,
            ("a.py:1",),
            ("A", "B"),
        ),
        (
            ev.MachineLost(machine="A", reason="no memory", cause=Cause.MEMORY, evidence=("x",)),
            Cause.MEMORY,
            ("x",),
            ("A", "B"),
        ),
        (ev.JobClosed(reason="the launcher ended"), Cause.RUNTIME, (), ("B",)),
        (ev.JobClosed(reason="no machine came", cause=Cause.MACHINE), Cause.MACHINE, (), ("B",)),
    ],
)
def test_a_run_that_ends_in_a_recovery_has_its_own_cause(
    last: ev.ScriptFailed | ev.MachineLost | ev.JobClosed,
    cause: Cause,
    evidence: tuple[str, ...],
    machines: tuple[str, ...],
) -> None:
    (one,) = incidents(KILLED, *RECOVERS, last, max_failures=1)
    assert (one.cause, one.reason, one.evidence) == (cause, last.reason, evidence)
    assert (one.others, one.way) == (("B was killed",), ENDED)
    assert one.machines == machines


def test_a_second_loss_that_empties_a_slot_is_named_once() -> None:
    last = ev.MachineLost(machine="A", reason="A was killed", cause=Cause.NATIVE)
    (one,) = incidents(KILLED, last, max_failures=1)
    assert (one.cause, one.reason, one.others) == (Cause.NATIVE, "A was killed", ("B was killed",))


@pytest.mark.parametrize("code", [130, 143])
def test_a_person_who_stops_a_recovery_knows_why(code: int) -> None:
    assert incidents(KILLED, ev.JobClosed(reason="stopped by a signal", exit_code=code)) == []


STOPPED = ev.MachineLost(machine="B", reason="stopped by SIGTERM", stopped_by=15)


@pytest.mark.parametrize("before", [(), (STOPPED,)])
def test_a_scheduler_that_stops_a_run_does_not_tell_why(before: tuple[ev.Event, ...]) -> None:
    said = ("Slurm job 7",)
    closed = ev.JobClosed(
        reason="stopped by SIGTERM", exit_code=143, cause=Cause.SCHEDULER.value, evidence=said
    )
    (one,) = incidents(*before, closed)
    assert (one.cause, one.reason, one.evidence) == (Cause.SCHEDULER, "stopped by SIGTERM", said)
    assert one.way == ENDED
    assert "ask the scheduler why" in incident_in_words(one)


def stopped(name: str, cause: str) -> ev.MachineLost:
    evidence = ("Slurm job 7",) if cause else ()
    return replace(STOPPED, machine=name, cause=cause, evidence=evidence)


@pytest.mark.parametrize("cause", ["", Cause.SCHEDULER.value])
@pytest.mark.parametrize("first_lost", [(), (KILLED, ev.MachineJoined(machine="C"))])
def test_a_run_that_a_signal_has_stopped_is_no_incident_of_its_scripts(
    first_lost: tuple[ev.Event, ...], cause: str
) -> None:
    """They save and end, each at its time. Whichever event is the last one, the signal has ended the run."""
    ready = [ev.WorkerReady(rank=rank, generation=1) for rank in range(2)]
    of_a, of_b = (
        ev.ScriptExited(machine=name, started_in=1, rank=rank, iteration=8) for rank, name in enumerate("AB")
    )
    fails = ev.CommunicationFailed(rank=1, generation=1, reason="closed")
    ends: list[tuple[ev.Event, ...]] = [(of_a, stopped("A", cause), *first_lost)]
    if not first_lost:
        ends = [
            (of_a, stopped("A", cause), fails),
            (of_b, stopped("A", cause)),
            (stopped("A", cause), of_b),
            (of_a, stopped("A", cause), stopped("B", cause)),
        ]
    for end in ends:
        found = incidents(*ready, *end)
        assert [one.cause for one in found] == [Cause.SCHEDULER] * bool(cause), end
        assert [(one.reason, one.evidence, one.way) for one in found] == [
            ("stopped by SIGTERM", ("Slurm job 7",), ENDED)
        ] * bool(cause)


def test_a_run_whose_history_begins_after_the_stop_does_not_blame_its_script() -> None:
    ready = [ev.WorkerReady(rank=rank, generation=1) for rank in range(2)]
    before = History.of(trains(*ready, ev.ScriptExited(machine="A", started_in=1, rank=0), stopped("A", "")))
    fails = ev.CommunicationFailed(rank=1, generation=1, reason="closed")
    assert History.of(journal(fails), before.state).incidents == []
    of_a_machine = ev.MachineLost(machine="B", reason="no heartbeat", cause=Cause.MACHINE)
    assert History.of(journal(of_a_machine), before.state).incidents == []


def test_a_journal_from_before_schedulers_were_told_apart_is_read() -> None:
    old = {"event": "MachineLost", "machine": "B", "reason": "stopped by SIGTERM", "stopped_by": 15}
    assert cause_of(event_from_dict(old)) == Cause.SIGNAL
    closed = event_from_dict({"event": "JobClosed", "reason": "stopped by SIGTERM", "exit_code": 143})
    assert incidents(closed) == []


@pytest.mark.parametrize(("saves", "cause"), [(8, Cause.STORE), (None, Cause.SCRIPT)])
def test_the_end_of_scripts_fails_a_run_with_a_cause(saves: int | None, cause: Cause) -> None:
    """The store has not taken the last checkpoint; or one script is over before the others are."""
    ready = [ev.WorkerReady(rank=rank, generation=1) for rank in range(2)]
    finished = [ev.WorkerFinished(rank=rank, generation=1, saves=saves) for rank in range(2)]
    exits = [
        ev.ScriptExited(machine=name, started_in=1, rank=rank, iteration=8) for rank, name in enumerate("AB")
    ]
    closed = ev.CommunicationFailed(rank=1, generation=1, reason="closed")
    ends: list[ev.Event] = [*finished, *exits] if saves else [exits[0], closed]
    (one,) = incidents(*ready, *ends)
    assert (one.cause, one.way, one.machines) == (cause, ENDED, ())
    assert ("not in the store" if saves else "worker 0 ended after 8") in one.reason


def test_a_fault_of_a_test_is_no_failure_of_the_script() -> None:
    fault = ev.FaultInjected(fault="kill:machine=1")
    script = ev.ScriptFailed(machine="A", started_in=1, reason="KeyError", cause="script")
    (one,) = incidents(fault, KILLED, *RECOVERS, script)
    assert one.cause == Cause.SCRIPT
    (one,) = incidents(fault, KILLED, ev.MachineLost(machine="A", reason="killed, too"), max_failures=1)
    assert (one.cause, one.evidence) == (Cause.INJECTED, ("--inject kill:machine=1",))


BROKE = ev.CommunicationFailed(rank=0, generation=1, reason="Timed out waiting 1800000ms for recv")
LATE = ev.DeadlinePassed(
    generation=2,
    phase=Phase.AGREEING.value,
    machines=("B",),
    reason="no answer within 300 s while agreeing",
    evidence=("worker 1 is at data.py:12 (load), in socket.recv",),
    located=("B",),
)


@pytest.mark.parametrize("ended", [False, True])
def test_a_machine_that_is_late_after_a_timeout_has_the_cause(ended: bool) -> None:
    """It stood in its own code, and the others' timeouts were no fault of a network."""
    back = () if ended else (ev.MachineJoined(machine="C"), report(0, 3, 7), report(1, 3, None))
    ready = () if ended else (ev.WorkerReady(rank=1, generation=3), ev.WorkerReady(rank=0, generation=3))
    (one,) = incidents(*(BROKE, report(0, 2, 7), LATE, *back, *ready), max_failures=0 if ended else None)
    assert (one.cause, one.reason, one.evidence) == (Cause.SCRIPT, LATE.reason, LATE.evidence)
    assert one.others == (BROKE.reason,)
    assert one.machines == ("B",)
    assert (one.way == ENDED) == ended


def broken(
    generation: int, at: int, rank: int = 0, reason: str = "Connection closed by peer"
) -> list[ev.Event]:
    """Communication breaks in a generation, after so many iterations, and no machine is lost."""
    return [
        ev.CommunicationFailed(rank=rank, generation=generation, reason=reason),
        *(report(one, generation + 1, at) for one in range(2)),
        *(ev.WorkerReady(rank=one, generation=generation + 1) for one in range(2)),
    ]


def test_communication_that_failed_by_itself_is_of_the_network() -> None:
    """Each time at another iteration, so that nothing but the count shows that it comes again."""
    first, second = incidents(*broken(1, at=7), *broken(2, at=8))
    assert (first.cause, first.reason, first.others) == (Cause.NETWORK, "Connection closed by peer", ())
    assert (first.machines, first.slots, first.times) == (("A",), (0,), 1)
    assert (second.machines, second.slots, second.times) == (("A",), (0,), 2)
    assert incident_in_words(second).startswith(
        "incident 2 on machine 0, for the 2nd time (cause: network): "
    )


@pytest.mark.parametrize(
    ("hosts", "reason", "machines"),
    [
        (("10.0.0.1", "10.0.0.2"), "Connection closed by peer [10.0.0.2]:41234", ("A", "B")),
        (("10.0.0.1", "10.0.0.2"), "Connection closed by peer [10.0.0.20]:41234", ("A",)),
        (("10.0.0.1", "10.0.0.1"), "Connection closed by peer [10.0.0.1]:41234", ("A", "B")),
        (("node-a", "node-b"), "connection closed by remote peer node-b<41234>", ("A", "B")),
        (("node-a", "node-b"), "connection closed by remote peer node-b.lab<41234>", ("A",)),
        (("[fd00::1]", "[fd00::2]"), "Read error [fd00::2]:5003: Connection reset.", ("A", "B")),
        (("10.0.0.1", "10.0.0.2"), "Connection closed by peer", ("A",)),
    ],
)
def test_an_address_in_the_text_names_the_other_end(
    hosts: tuple[str, str], reason: str, machines: tuple[str, ...]
) -> None:
    joined = [
        ev.MachineJoined(machine=name, address=f"{host}:7000") for name, host in zip("AB", hosts, strict=True)
    ]
    opened: list[ev.Event] = [
        ev.JobOpened(machines=2),
        *joined,
        *(report(rank, 1, None) for rank in range(2)),
    ]
    (one,) = History.of(journal(*opened, *broken(1, at=7, reason=reason))).incidents
    assert (one.machines, one.slots) == (machines, (0, 1)[: len(machines)])


def test_several_machines_at_one_address_cannot_be_told_apart() -> None:
    joined = [ev.MachineJoined(machine=name, address=f"10.0.0.1:{7000 + i}") for i, name in enumerate("ABC")]
    opened: list[ev.Event] = [
        ev.JobOpened(machines=3),
        *joined,
        *(report(rank, 1, None) for rank in range(3)),
    ]
    broke = ev.CommunicationFailed(rank=0, generation=1, reason="Connection reset by peer [10.0.0.1]:40000")
    back = [*(report(rank, 2, 7) for rank in range(3))]
    ready = [ev.WorkerReady(rank=rank, generation=2) for rank in range(3)]
    (one,) = History.of(journal(*opened, broke, *back, *ready)).incidents
    assert one.machines == ("A",)


def test_a_replacement_whose_script_fails_is_told_with_the_loss() -> None:
    """It has its own place in the code, and its machine counts from then on."""
    failed = ev.ScriptFailed(
        machine="C", started_in=2, reason="worker 1: no data", cause=Cause.SCRIPT, evidence=("at a.py:3",)
    )
    back = (ev.MachineJoined(machine="D"), report(0, 3, 7), report(1, 3, None))
    ready = (ev.WorkerReady(rank=1, generation=3),)
    (one,) = incidents(KILLED, ev.MachineJoined(machine="C"), failed, *back, *ready)
    assert (one.cause, one.reason) == (Cause.SIGNAL, "B was killed")
    assert one.others == ("worker 1: no data (at a.py:3)",)
    assert (one.machines, one.slots) == (("B", "C"), (1, 1))


def test_a_replacement_whose_script_fails_after_a_loss_on_purpose_is_the_failure() -> None:
    failed = ev.ScriptFailed(
        machine="C", started_in=2, reason="worker 1: no data", cause=Cause.DATA, evidence=("at a.py:3",)
    )
    left = ev.MachineLost(machine="B", reason="it was drained", on_request=True)
    back = (ev.MachineJoined(machine="D"), report(0, 3, 7), report(1, 3, None))
    ready = (ev.WorkerReady(rank=1, generation=3),)
    (one,) = incidents(left, ev.MachineJoined(machine="C"), failed, *back, *ready)
    assert (one.cause, one.reason, one.evidence) == (Cause.DATA, "worker 1: no data", ("at a.py:3",))
    assert one.others == ("it was drained",)


def test_a_replacement_without_memory_ends_the_run_with_that_cause() -> None:
    starved = ev.MachineLost(machine="B", reason="B was killed", cause=Cause.MEMORY)
    failed = ev.ScriptFailed(
        machine="C", started_in=2, reason="worker 1: MemoryError", cause=Cause.MEMORY, evidence=("at a.py:3",)
    )
    (one,) = incidents(starved, ev.MachineJoined(machine="C"), failed)
    assert (one.cause, one.reason, one.evidence) == (Cause.MEMORY, "worker 1: MemoryError", ("at a.py:3",))
    assert (one.others, one.way) == (("B was killed",), ENDED)
    assert {*one.machines} == {"B", "C"}


AGAIN = ev.MachineLost(machine="B", reason="it starts again", starts_again=True)
BACK = (ev.MachineJoined(machine="B.1"), report(0, 2, 7), report(1, 2, None))
READY = (ev.WorkerReady(rank=1, generation=2), ev.WorkerReady(rank=0, generation=2))


@pytest.mark.parametrize("drained", [False, True])
def test_what_happens_on_purpose_is_no_incident(drained: bool) -> None:
    left = ev.MachineLost(machine="B", reason="it was drained", on_request=True)
    assert incidents(left if drained else AGAIN, *BACK, *READY) == []


def test_a_failure_after_it_is_one() -> None:
    lost = ev.MachineLost(machine="A", reason="A was killed", cause=Cause.SIGNAL)
    more = (ev.MachineJoined(machine="C"), report(0, 3, None), report(1, 3, None))
    history = History.of(
        journal(
            ev.JobOpened(machines=2),
            *(ev.MachineJoined(machine=m) for m in "AB"),
            *(report(rank, 1, None) for rank in range(2)),
            *(AGAIN, *BACK[:2], lost, *more),
        )
    )
    assert history.failures == 1
    assert [one.reason for one in history.incidents] == ["A was killed"]
    assert history.incidents[0].others == ("it starts again",)


# ------------------------------------------------------------------------------------- without a session


def sessionless(*events: ev.Event) -> History:
    """The history of a job of two machines whose workers never report."""
    opened: list[ev.Event] = [
        ev.JobOpened(machines=2, restarts=1),
        *(ev.MachineJoined(machine=name) for name in "AB"),
    ]
    return History.of(journal(*opened, *events))


def lost(machine: str, *, joins: str, generation: int) -> list[ev.Event]:
    """Machine B, or one in its place, is lost, and all scripts start again in the generation after next."""
    return [
        ev.MachineLost(machine=machine, reason=f"{machine} was killed", cause=Cause.SIGNAL),
        ev.MachineJoined(machine=joins),
        ev.SessionlessWorkers(machine="A", generation=generation),
    ]


def test_each_loss_without_a_session_is_an_incident_once_all_have_started_again() -> None:
    history = sessionless(*lost("B", joins="C", generation=2))
    (one,) = history.incidents
    assert (one.cause, one.reason, one.machines, one.slots) == (Cause.SIGNAL, "B was killed", ("B",), (1,))
    assert (one.way, one.seconds, one.others) == ("restart", 2.0, ())
    history = sessionless(*lost("B", joins="C", generation=2), *lost("C", joins="D", generation=4))
    assert [(one.machines, one.way) for one in history.incidents] == [
        (("B",), "restart"),
        (("C",), "restart"),
    ]
    assert history.lost_seconds() == 4.0
    assert history.lost_seconds(now=1000.0) == 4.0


def test_an_error_without_a_session_blames_no_machine_that_was_lost_before() -> None:
    failed = [ev.ScriptFailed(machine="A", started_in=3, reason="KeyError", cause=Cause.SCRIPT)]
    failed += [ev.ScriptFailed(machine="A", started_in=4, reason="IndexError", cause=Cause.SCRIPT)]
    history = sessionless(*lost("B", joins="C", generation=2), *failed)
    assert [(one.cause, one.machines, one.others, one.way) for one in history.incidents] == [
        (Cause.SIGNAL, ("B",), (), "restart"),
        (Cause.SCRIPT, ("A",), (), "restart"),
        (Cause.SCRIPT, ("A",), (), ENDED),
    ]


def test_the_only_machine_starts_again_without_being_told_to() -> None:
    killed = ev.MachineLost(machine="A", reason="A was killed", cause=Cause.SIGNAL)
    opened: list[ev.Event] = [ev.JobOpened(machines=1), ev.MachineJoined(machine="A")]
    (one,) = History.of(journal(*opened, killed, ev.MachineJoined(machine="A.1"))).incidents
    assert (one.machines, one.way, one.seconds) == (("A",), "restart", 1.0)
    spare = ev.MachineJoined(machine="B")
    (one,) = History.of(journal(*opened, spare, killed)).incidents
    assert (one.machines, one.way) == (("A",), "restart")


def test_a_loss_that_the_other_scripts_can_do_without_is_told_at_the_end() -> None:
    killed = ev.MachineLost(machine="B", reason="B was killed", cause=Cause.SIGNAL)
    ends = [ev.ScriptExited(machine="A", started_in=1), ev.ScriptExited(machine="C", started_in=2)]
    history = sessionless(killed, ev.MachineJoined(machine="C"), *ends)
    assert history.state.verdict is not None
    assert history.state.verdict.ok
    (one,) = history.incidents
    assert (one.machines, one.way) == (("B",), ENDED)


def test_the_events_of_a_story_without_a_session_make_one_incident() -> None:
    """The protocol's own scenario: B is lost once, and all processes start again."""
    scenario = RecordingScenario()
    scenario.run(SCENARIOS / "sessionless-scripts-restart.txt")
    (one,) = History.of(journal(*scenario.events)).incidents
    assert (one.machines, one.way) == (("B",), "restart")


@pytest.mark.parametrize("scenario", ["before-it-is-stopped", "before-what-follows-from-an-audit"])
def test_a_run_that_ends_with_what_an_audit_has_found_is_of_the_machine(scenario: str) -> None:
    run = RecordingScenario()
    run.run(SCENARIOS / f"a-job-that-ends-{scenario}.txt")
    (incident,) = History.of(journal(*run.events)).incidents
    assert (incident.cause, incident.way) == (Cause.MACHINE, ENDED)
    assert "has computed iteration 9 wrong" in incident.reason
