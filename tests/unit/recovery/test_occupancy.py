"""Who held what and did what, counted by hand: one event a second."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.occupancy import Occupancy, Tenure, occupancy
from tests.support.journals import BEGAN, RECOVERED, entries_of, machine

A, B, SPARE = (machine(slot) for slot in range(3))


LIVE = RECOVERED[:6]


def read(events: list[ev.Event], until: float = 0.0, **began: float) -> Occupancy:
    changes = map(History().apply, entries_of(events))
    known = {(int(name[1]), int(name[3])): BEGAN + at for name, at in began.items()}
    return occupancy(changes, known, BEGAN + until)


def spans(found: Occupancy, rank: int) -> list[tuple[str, float, float]]:
    return [
        (span.doing.value, span.since - BEGAN, span.until - BEGAN)
        for span in found.workers
        if span.rank == rank
    ]


def test_a_recovery() -> None:
    found = read(RECOVERED, until=20)
    assert spans(found, 0) == [
        ("starts", 0, 2),
        ("starts", 2, 4),
        ("waits", 4, 5),
        ("trains", 5, 9),
        ("waits", 9, 13),
        ("trains", 13, 20),
    ]
    assert spans(found, 1) == [
        ("starts", 0, 2),
        ("starts", 2, 5),
        ("trains", 5, 9),
        ("starts", 9, 10),
        ("waits", 10, 11),
        ("replays", 11, 13),
        ("trains", 13, 20),
    ]
    assert {span.machine for span in found.workers if span.rank == 1} == {"", B, SPARE}
    last = found.workers[-1]
    assert (last.machine, last.generation, last.stages, last.holds) == (SPARE, 2, (1,), ("stage 1",))
    phases = [(span.phase, span.since - BEGAN, span.until - BEGAN, span.generation) for span in found.phases]
    assert phases == [
        (Phase.FORMING, 0, 2, 0),
        (Phase.AGREEING, 2, 5, 1),
        (Phase.LIVE, 5, 9, 1),
        (Phase.AGREEING, 9, 11, 2),
        (Phase.RECOVERING, 11, 13, 2),
        (Phase.LIVE, 13, 20, 2),
    ]


def test_machines_and_spares() -> None:
    found = read(RECOVERED, until=20)
    assert found.tenures == (
        Tenure(A, 0, BEGAN + 2, BEGAN + 20, ""),
        Tenure(B, 1, BEGAN + 2, BEGAN + 9, "lost"),
        Tenure(SPARE, None, BEGAN + 3, BEGAN + 9, "took slot 1"),
        Tenure(SPARE, 1, BEGAN + 9, BEGAN + 20, ""),
    )


def test_nobody_comes() -> None:
    lost: list[ev.Event] = [ev.MachineLost(machine=name, reason="gone") for name in (SPARE, A)]  # 6 and 7
    found = read([*LIVE, *lost], until=30)
    assert spans(found, 0)[-2:] == [("trains", 5, 7), ("absent", 7, 30)]
    assert spans(found, 1)[-2:] == [("trains", 5, 7), ("waits", 7, 30)]
    assert found.phases[-1].phase == Phase.FORMING
    assert [place.end for place in found.tenures if place.machine == SPARE] == ["lost"]


def test_a_machine_that_was_asked_to_leave_is_not_lost() -> None:
    found = read([*LIVE, ev.MachineLost(machine=SPARE, reason="drained", on_request=True)])
    assert [place.end for place in found.tenures if place.machine == SPARE] == ["left"]


def test_steps_begin_after_the_groups_are_formed() -> None:
    found = read(RECOVERED, until=20, w0g2=17.0, w1g2=16.0, w0g1=4.0)
    assert spans(found, 0)[-2:] == [("joins", 13, 17), ("trains", 17, 20)]
    assert spans(found, 1)[-2:] == [("joins", 13, 16), ("trains", 16, 20)]
    assert ("trains", 5, 9) in spans(found, 0)  # a clock that is slow makes no negative time


def test_the_end() -> None:
    finished: list[ev.Event] = [ev.WorkerFinished(rank=rank, generation=1) for rank in (1, 0)]  # 6 and 7
    exits: list[ev.Event] = [ev.ScriptExited(machine=name, started_in=1) for name in (A, B)]  # 8 and 9
    found = read([*LIVE, *finished, *exits], until=100)
    assert spans(found, 1)[-2:] == [("trains", 5, 6), ("done", 6, 9)]
    assert spans(found, 0)[-2:] == [("trains", 5, 7), ("done", 7, 9)]
    assert found.training_over == BEGAN + 7
    assert found.phases[-1].until == BEGAN + 9  # what workers note later does not count


def test_a_recovery_after_a_worker_has_finished() -> None:
    finished = ev.WorkerFinished(rank=0, generation=1)
    found = read([*LIVE, finished, ev.MachineLost(machine=B, reason="gone")], until=20)
    assert spans(found, 0)[-2:] == [("done", 6, 7), ("waits", 7, 20)]
    assert found.training_over is None


def test_clocks_that_differ() -> None:
    entries = list(entries_of(RECOVERED))
    late = entries[11]
    entries[11] = Entry(late.position, late.event, BEGAN + 1, "worker 0")  # its clock is 10 s behind
    found = occupancy(map(History().apply, entries))
    assert [(span.since - BEGAN, span.until - BEGAN) for span in found.phases][-3:] == [
        (9, 10),
        (10, 13),
        (13, 13),
    ]
    assert all(span.since < span.until for span in found.workers)
