"""Timelines of recoveries, read from small journals."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.events import Event
from swift_ft.recovery.history import History
from swift_ft.recovery.recoveries import Recovery


def journal(*events: Event) -> list[Entry]:
    """One event per second, from 100 s on."""
    return [Entry(i, event, 100.0 + i, "test") for i, event in enumerate(events)]


def report(rank: int, generation: int, at: int | None, live: bool = True) -> ev.StatusReported:
    return ev.StatusReported(
        rank=rank,
        generation=generation,
        iteration=at,
        live=live and at is not None,
        stages=(rank,),
        pipeline_known=True,
    )


START: tuple[Event, ...] = (
    ev.JobOpened(machines=3),
    *(ev.MachineJoined(machine=m) for m in "ABC"),
    *(report(rank, 1, None) for rank in range(3)),
    ev.CheckpointCommitted(iteration=20, epoch=1),  # 107 s
)


def found(*events: Event) -> list[Recovery]:
    return History.of(journal(*START, *events)).recoveries


def test_an_undisturbed_run_has_none() -> None:
    assert found(ev.WorkerFinished(rank=0, generation=1)) == []


def test_the_timeline_of_a_replay() -> None:
    (recovery,) = found(
        ev.MachineLost(machine="B", reason="was killed by SIGKILL"),  # 108 s
        ev.MachineJoined(machine="D"),
        report(0, 2, 47),
        report(2, 2, 48),
        report(1, 2, None),
        ev.WorkerReady(rank=1, generation=2, replayed=27, from_peers=9000, from_store=100),  # 113 s
        ev.CheckpointCommitted(iteration=60, epoch=1),
    )
    assert (recovery.detected, recovery.joined, recovery.reported) == (108.0, 109.0, 112.0)
    assert (recovery.replayed, recovery.live) == (113.0, 113.0)
    assert (recovery.machines, recovery.slots, recovery.reasons) == (["B"], [1], ["was killed by SIGKILL"])
    assert (recovery.mode, recovery.resume, recovery.generation, recovery.reason) == ("replay", 47, 2, "")
    assert recovery.replayed_iterations == {1: 27}
    assert recovery.iterations_lost == {0: 0, 2: 0}
    assert recovery.ahead == [2]
    assert (recovery.from_peers, recovery.from_store) == ({1: 9000}, {1: 100})


def test_two_losses_are_one_recovery_until_it_is_live() -> None:
    first, second = found(
        ev.MachineLost(machine="B", reason="killed"),
        ev.MachineJoined(machine="D"),
        ev.MachineLost(machine="D", reason="killed again"),
        ev.MachineJoined(machine="E"),
        *(report(rank, 3, at) for rank, at in enumerate((47, None, 47))),
        ev.WorkerReady(rank=1, generation=3, replayed=27),
        ev.MachineLost(machine="C", reason="killed much later"),
    )
    assert (first.machines, first.slots, first.generation) == (["B", "D"], [1, 1], 3)
    assert first.live is not None
    assert (second.machines, second.slots, second.live) == (["C"], [2], None)


def test_a_fallback_says_why_and_what_it_cost() -> None:
    (recovery,) = found(
        ev.ReplayFailed(rank=1, generation=1, reason="diverged"),
        *(report(rank, 2, 47) for rank in range(3)),
        *(ev.WorkerReady(rank=rank, generation=2) for rank in range(3)),
    )
    assert (recovery.mode, recovery.resume) == ("fallback", 20)
    assert "diverged" in recovery.reason
    assert recovery.iterations_lost == {0: 27, 1: 27, 2: 27}
    assert recovery.machines == []


def test_what_an_interrupted_fallback_cost_is_not_forgotten() -> None:
    (recovery,) = found(
        ev.ReplayFailed(rank=1, generation=1, reason="diverged"),
        *(report(rank, 2, 47) for rank in range(3)),
        ev.WorkerReady(rank=0, generation=2),
        ev.MachineLost(machine="B", reason="killed"),
        ev.MachineJoined(machine="D"),
        *(report(rank, 3, at) for rank, at in enumerate((20, None, 47))),
        *(ev.WorkerReady(rank=rank, generation=3) for rank in range(3)),
    )
    assert recovery.iterations_lost == {0: 27, 1: 27, 2: 27}
    assert recovery.live is not None


def test_machines_that_did_not_answer_are_named() -> None:
    (recovery,) = found(
        ev.CommunicationFailed(rank=0, generation=1, reason="reset"),
        report(0, 2, 30),
        ev.DeadlinePassed(
            generation=2, phase="agreeing", machines=("C", "B"), reason="no answer within 30 s"
        ),
    )
    assert (recovery.machines, recovery.slots) == (["B", "C"], [1, 2])
    assert recovery.reasons == ["no answer within 30 s"] * 2


def test_an_interrupted_network() -> None:
    (recovery,) = found(
        ev.CommunicationFailed(rank=0, generation=1, reason="reset"),
        *(report(rank, 2, 30) for rank in range(3)),
    )
    assert (recovery.mode, recovery.resume, recovery.machines) == ("continue", 30, [])
    assert recovery.live == recovery.reported
    assert recovery.replayed is None


def test_a_restart_costs_everything_since_the_checkpoint() -> None:
    entries = journal(
        *START[:-1],
        ev.MachineLost(machine="B", reason="killed"),
        ev.MachineJoined(machine="D"),
        *(report(rank, 2, at) for rank, at in enumerate((3, None, 4))),
        *(report(rank, 3, None) for rank in range(3)),
    )
    (recovery,) = History.of(entries).recoveries
    assert (recovery.mode, recovery.resume, recovery.generation) == ("restart", 0, 3)
    assert "no checkpoint is committed yet" in recovery.reason
    assert recovery.iterations_lost == {0: 3, 2: 4}


def test_a_lost_spare_is_no_recovery() -> None:
    assert found(ev.MachineJoined(machine="S"), ev.MachineLost(machine="S", reason="killed")) == []


def test_it_can_be_written_as_json() -> None:
    (recovery,) = found(ev.MachineLost(machine="B", reason="killed"))
    assert recovery.to_dict()["machines"] == ["B"]
    assert recovery.to_dict()["live"] is None


def replica(
    rank: int, generation: int, at: int | None, *updated: int, dirty: str | None = None, exactly: bool = False
) -> ev.StatusReported:
    return ev.StatusReported(
        rank=rank,
        generation=generation,
        iteration=at,
        live=at is not None,
        stages=(),
        pipeline_known=True,
        dirty=dirty,
        holds=("the model",),
        updated=updated,
        undoes_exactly=exactly,
    )


REPLICAS_START: tuple[Event, ...] = (
    ev.JobOpened(machines=4),
    *(ev.MachineJoined(machine=m) for m in "ABCD"),
    *(replica(rank, 1, None) for rank in range(4)),
    ev.CheckpointCommitted(iteration=20, epoch=1),
)


def test_what_replicas_sent() -> None:
    (recovery,) = History.of(
        journal(
            *REPLICAS_START,
            ev.MachineLost(machine="B", reason="killed"),
            ev.MachineJoined(machine="E"),
            replica(0, 2, 47, 3),
            replica(1, 2, None),
            replica(2, 2, 48),
            replica(3, 2, 48, dirty="optimizer"),
        )
    ).recoveries
    assert (recovery.mode, recovery.resume, recovery.live) == ("replica", 48, recovery.reported)
    assert (recovery.restored, recovery.forwarded) == ([1, 3], [0])
    assert (recovery.copied, recovery.undone) == ({}, {})
    assert recovery.iterations_lost == {0: 0, 2: 0, 3: 0}


def test_what_was_copied_and_what_was_undone() -> None:
    (recovery,) = History.of(
        journal(
            *REPLICAS_START,
            ev.CommunicationFailed(rank=0, generation=1, reason="reset"),
            replica(0, 2, 47, 0, 1, 2),
            replica(1, 2, 47, 0),
            replica(2, 2, 47, 0, 2),
            replica(3, 2, 47, 0, exactly=True),
        )
    ).recoveries
    assert (recovery.restored, recovery.forwarded) == ([], [])
    assert recovery.copied == {0: 2, 2: 1}
    assert recovery.undone == {0: 1, 1: 1, 2: 1, 3: 1}
    assert recovery.undone_exactly == [3]


def test_copies_and_undos_are_those_of_the_plan_that_went_live() -> None:
    """A fallback, because an undo failed, has none of its own."""
    first, second = History.of(
        journal(
            *REPLICAS_START,
            ev.CommunicationFailed(rank=0, generation=1, reason="reset"),
            *(replica(rank, 2, 47, 0) for rank in range(4)),
            ev.ReplayFailed(rank=1, generation=2, reason="the last update cannot be undone"),
            *(replica(rank, 3, 47, 0) for rank in range(4)),
            *(ev.WorkerReady(rank=rank, generation=3) for rank in range(4)),
        )
    ).recoveries
    assert first.undone == {0: 1, 1: 1, 2: 1, 3: 1}
    assert (second.mode, second.undone, second.restored) == ("fallback", {}, [])
    assert second.to_dict()["copied"] == {}
