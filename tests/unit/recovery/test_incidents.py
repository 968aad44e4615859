"""Incidents of runs that end in a recovery, and of recoveries that nobody has to look into."""

from __future__ import annotations

import pytest

from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from swift_ft.recovery.incidents import ENDED, Incident
from swift_ft.recovery.job_state import Phase
from tests.unit.recovery.test_recoveries import journal, report

RECOVERS = (ev.MachineJoined(machine="C"), report(0, 2, 7), report(1, 2, None))
KILLED = ev.MachineLost(machine="B", reason="B was killed", cause=Cause.SIGNAL)


def incidents(*events: ev.Event, max_failures: int | None = None) -> list[Incident]:
    """All of a job with two machines that trains, restarts no script, and then meets these events."""
    entries: list[Entry] = journal(
        ev.JobOpened(machines=2, max_failures=max_failures),
        *(ev.MachineJoined(machine=m) for m in "AB"),
        *(report(rank, 1, None) for rank in range(2)),
        ev.CheckpointCommitted(iteration=5, epoch=1),
        *events,
    )
    return History.of(entries).incidents


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
            ev.MachineLost(machine="A", reason="no memory", out_of_memory=True, evidence=("x",)),
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


def test_communication_that_failed_by_itself_is_of_the_network() -> None:
    (one,) = incidents(BROKE, report(0, 2, 7), report(1, 2, 7), *READY)
    assert (one.cause, one.reason, one.others) == (Cause.NETWORK, BROKE.reason, ())


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
