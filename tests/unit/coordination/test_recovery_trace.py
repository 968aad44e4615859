"""When a process records: from a loss until all is well again, and at no other time."""

from __future__ import annotations

import time

from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.observe.spans import Recorder, Recording
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.events import Event
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step
from tests.support.journals import ENDED, RECOVERED, checkpoint, machine, opening

LOSS = 9
"""Its position in RECOVERED."""
LIVE = 13


class Process:
    """One that follows a journal."""

    def __init__(self, by: str = "worker 0", *, until_live: bool = False) -> None:
        self.recorder = Recorder()
        self.written: list[tuple[Recording, int]] = []
        self.trace = RecoveryTrace(
            by,
            lambda recording, generation: self.written.append((recording, generation)),
            until_live=until_live,
            own=self.recorder,
        )
        self.state = State()
        self.position = 0

    def catch_up(self, events: list[Event]) -> None:
        """What was read before the journal thread starts."""
        self._read(events)
        self.trace.start()

    def follow(self, *events: Event) -> None:
        """One block."""
        before = self.state
        self._read(list(events))
        self.trace.on_change(before, self.state)

    def _read(self, events: list[Event]) -> None:
        for event in events:
            self.state = step(self.state, event)
            self.trace.on_entries([Entry(self.position, event, time.time(), "worker 0")])
            self.position += 1


def seen_in(recording: Recording) -> dict[int, int]:
    """By position, when it was seen."""
    return {position: at for first, last, at in recording.seen for position in range(first, last + 1)}


def live(*, until_live: bool = False) -> Process:
    process = Process(until_live=until_live)
    process.catch_up(RECOVERED[:LOSS])
    assert process.state.phase == Phase.LIVE
    return process


def test_a_healthy_run_records_nothing() -> None:
    process = Process()
    process.catch_up([])
    for event in [*opening(2, spares=1), *checkpoint(2, 0)]:
        process.follow(event)
    assert process.state.phase == Phase.LIVE
    process.trace.end(1)
    assert (process.recorder.begun, process.written) == (0, [])


def test_a_worker_records_until_its_first_iteration() -> None:
    process = live()
    for event in RECOVERED[LOSS:]:
        assert process.recorder.active == (event is not RECOVERED[LOSS])
        process.follow(event)
    assert process.state.phase == Phase.LIVE
    assert process.written == []
    process.trace.end(2)
    process.trace.end(2)  # the next iteration
    ((recording, generation),) = process.written
    assert generation == 2
    assert [*seen_in(recording)] == [*range(LOSS, LIVE + 1)]
    assert {position for position, _ in recording.own} <= {*range(LOSS, LIVE + 1)}
    assert recording.began == seen_in(recording)[LOSS]
    assert not process.recorder.active


def test_an_iteration_that_the_loss_did_not_interrupt_ends_no_recording() -> None:
    process = live()
    process.follow(RECOVERED[LOSS])
    process.trace.end(1)  # nobody waits for the lost one in it
    assert (process.recorder.active, process.written) == (True, [])
    for event in RECOVERED[LOSS + 1 :]:
        process.follow(event)
    process.trace.end(2)
    ((recording, generation),) = process.written
    assert generation == 2
    assert LOSS in seen_in(recording)


def test_what_it_appended_is_not_later_than_what_it_saw() -> None:
    process = live()
    process.recorder.begin()  # its connections broke before the journal had the loss
    for event in RECOVERED[LOSS:]:
        process.follow(event)
    process.trace.end(2)
    ((recording, _),) = process.written
    seen = seen_in(recording)
    assert {position for position, _ in recording.own} == {*range(LOSS, LIVE + 1)}
    assert all(recording.began <= at <= seen[position] for position, at in recording.own)


def test_an_agent_records_until_all_are_live() -> None:
    process = live(until_live=True)
    for event in RECOVERED[LOSS:LIVE]:
        process.follow(event)
    assert process.written == []
    process.follow(RECOVERED[LIVE])
    ((_, generation),) = process.written
    assert (generation, process.recorder.active) == (2, False)


def test_a_second_loss_before_the_first_iteration_begins_another_recording() -> None:
    process = live()
    for event in RECOVERED[LOSS:]:
        process.follow(event)
    process.follow(ev.MachineLost(machine=machine(2), reason="again"))
    ((first, generation),) = process.written
    assert (generation, process.recorder.active) == (2, True)
    assert first.seen[-1][1] == LIVE
    process.follow(ev.MachineJoined(machine="m-9.0", address="h:1", setup=("torch: 2",)))
    process.trace.end(3)
    second, generation = process.written[-1]
    assert (generation, second.seen[0][0]) == (3, LIVE + 1)


def test_a_loss_that_needs_no_recovery() -> None:
    process = Process()
    process.catch_up(opening(2, spares=1))
    process.recorder.begin()  # its sentinel lost the spare
    process.follow(ev.MachineLost(machine=machine(2), reason="its agent's connection ended"))
    assert process.state.phase == Phase.LIVE
    assert not process.recorder.active


def test_losses_that_it_has_only_read_of() -> None:
    process = Process()
    process.catch_up(RECOVERED)
    process.follow(ev.PartPersisted(rank=0, iteration=10, generation=2, epoch=1, path="p"))
    assert not process.recorder.active


def test_one_that_is_started_in_a_recovery() -> None:
    for end, recovers in ((LOSS, False), (LOSS + 1, True), (LIVE, True), (LIVE + 1, False), (2, False)):
        process = Process(until_live=True)
        process.catch_up(RECOVERED[:end])
        process.trace.joined(process.state, since=5)
        assert process.recorder.active == recovers, end
        if recovers:
            for event in RECOVERED[end:]:
                process.follow(event)
            ((recording, generation),) = process.written
            assert (recording.began, generation) == (5, 2)


def test_a_job_that_ends_in_a_recovery() -> None:
    process = live()
    process.follow(RECOVERED[LOSS])
    process.follow(ev.JobClosed(reason="enough"))
    assert not process.recorder.active
    process.trace.end(2)
    assert process.written == []


def test_the_end_of_a_run_is_no_recovery() -> None:
    process = live()
    for event in [*RECOVERED[LOSS:], *ENDED]:
        process.follow(event)
        if process.position == LIVE + 1:
            process.trace.end(2)
    assert (len(process.written), process.recorder.begun) == (1, 1)
