"""All parts of a worker, called as one, in the declared order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swift_ft.recovery.events import StatusReported, WorkerReady
from swift_ft.recovery.job_state import State
from swift_ft.runtime.worker.order import place_of
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo


class Parts(Part):
    """The parts of one worker.

    Args:
        parts: in any order.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = sorted(parts, key=lambda part: place_of(part.name))

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def start(self) -> None:
        for part in self._parts:
            part.start()

    def begin(self, step: StepInfo) -> None:
        for part in self._parts:
            part.begin(step)

    def again(self, step: StepInfo) -> None:
        for part in self._parts:
            part.again(step)

    def completed(self, step: StepInfo) -> None:
        for part in self._parts:
            part.completed(step)

    def boundary(self, step: StepInfo) -> None:
        for part in self._parts:
            part.boundary(step)

    def why_checkpoint(self, committed: int | None) -> str:
        reasons = (part.why_checkpoint(committed) for part in self._parts)
        return next(filter(None, reasons), "")

    def pause(self) -> None:
        for part in self._parts:
            part.pause()

    def interrupted(self, interruption: Interruption) -> None:
        for part in reversed(self._parts):
            part.interrupted(interruption)

    def put_back(self, interruption: Interruption) -> None:
        for part in self._parts:
            part.put_back(interruption)

    def settle(self, state: State) -> None:
        for part in self._parts:
            part.settle(state)

    def report(self, report: StatusReported) -> StatusReported:
        for part in self._parts:
            # Each part fills its own fields, so a new part needs no change here (decision 94).
            report = part.report(report)
        return report

    def idle(self) -> None:
        for part in self._parts:
            part.idle()

    def open(self, state: State, begin: int) -> None:
        for part in self._parts:
            part.open(state, begin)

    def ready(self, ready: WorkerReady) -> WorkerReady:
        for part in self._parts:
            ready = part.ready(ready)
        return ready

    def prepare(self, round: Round) -> None:
        for part in self._parts:
            part.prepare(round)

    def join(self, round: Round) -> str | None:
        causes = (part.join(round) for part in self._parts)
        return next((cause for cause in causes if cause is not None), None)  # the others are not asked then

    def live(self, round: Round) -> None:
        for part in self._parts:
            part.live(round)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def close(self) -> None:
        for part in reversed(self._parts):
            part.close()
