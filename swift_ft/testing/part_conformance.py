"""The conformance suite for a part of your own: whether it bears what a worker goes through.

from swift_ft.testing import PartConformanceTests

class TestMyPart(PartConformanceTests):
    @pytest.fixture
    def part(self):
        return MyPart()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from swift_ft.recovery.events import StatusReported, WorkerReady
from swift_ft.recovery.job_state import State
from swift_ft.recovery.snapshot import decoded, encoded
from swift_ft.runtime.worker.order import ORDER
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.testing.scenario import Scenario

_DEADLINE_S = 30.0
_RANK = 1

_FORMED = ("open 3", "join A B C D")
_STARTED = (*_FORMED, "report all nothing")
_LOST = (*_STARTED, "ready all", "committed 20", "lost C")
_BACK = (*_LOST, "report 0,1 at 47", "report 2 nothing")


def _state(lines: tuple[str, ...]) -> State:
    """The job after these lines of a scenario (:mod:`swift_ft.testing.scenario`)."""
    scenario = Scenario()
    for line in lines:
        scenario.run_line(line)
    return scenario.state


class PartConformanceTests:
    """Inherit from it and add a fixture ``part``: a new part for each test, as a script would make it."""

    @pytest.fixture
    def part(self) -> Part:
        """A new part."""
        raise NotImplementedError(
            "PartConformanceTests needs a fixture `part` in the class that inherits from it"
        )

    # ------------------------------------------------------------------------------- what a worker does

    def go_live(self, part: Part, lines: tuple[str, ...], iteration: int) -> None:
        """From a report to the first step, as a worker does after its start and after each loss."""
        state = _state(lines)
        report = StatusReported(rank=_RANK, generation=state.generation, iteration=iteration, live=True)
        part.settle(state)
        part.report(report)
        part.idle()
        part.open(state, iteration)
        part.ready(WorkerReady(rank=_RANK, generation=state.generation))
        round = Round.of(_RANK, state)
        part.prepare(round)
        part.open(state, iteration)
        assert part.join(round) is None
        part.live(round)

    def do_steps(self, part: Part, begin: int, end: int, generation: int = 1) -> None:
        """Live steps from one iteration to another."""
        for iteration in range(begin, end):
            step = StepInfo(iteration, generation)
            part.begin(step)
            part.completed(step)
            assert isinstance(part.why_checkpoint(20), str)
            part.boundary(step)

    def interrupt(self, part: Part, interruption: Interruption) -> None:
        """Communication has ended."""
        part.pause()
        part.interrupted(interruption)
        part.put_back(interruption)

    # ------------------------------------------------------------------------------------------- checks

    def test_its_name_is_its_own(self, part: Part) -> None:
        assert part.name, "give the class a `name`"
        assert part.name not in ORDER, f"{part.name!r} is a part of swift_ft"

    def test_a_run_without_losses(self, part: Part) -> None:
        part.start()
        self.go_live(part, _STARTED, 0)
        self.do_steps(part, 0, 5)
        part.finish()
        part.close()

    @pytest.mark.parametrize("caught", [False, True])
    def test_an_interrupted_step_is_repeated(self, part: Part, caught: bool) -> None:
        part.start()
        self.go_live(part, _STARTED, 0)
        self.do_steps(part, 0, 47)
        part.begin(StepInfo(47, 1))
        self.interrupt(part, Interruption(caught=caught))
        self.go_live(part, _BACK, 47)
        self.do_steps(part, 47, 50, generation=2)
        part.close()

    def test_a_loss_before_the_first_step(self, part: Part) -> None:
        part.start()
        part.settle(_state(_FORMED))
        part.report(StatusReported(rank=_RANK, generation=1, iteration=0, live=True))
        self.go_live(part, _STARTED, 0)
        self.do_steps(part, 0, 2)

    def test_a_replacement_is_interrupted_before_its_first_step(self, part: Part) -> None:
        """In a function between two steps, which all repeat."""
        part.start()
        self.go_live(part, _BACK, 47)
        self.interrupt(part, Interruption(in_step=False))
        self.go_live(part, _BACK, 47)
        self.do_steps(part, 47, 48, generation=2)

    def test_a_loss_between_two_steps(self, part: Part) -> None:
        part.start()
        self.go_live(part, _STARTED, 0)
        self.do_steps(part, 0, 47)
        self.interrupt(part, Interruption(in_step=False))
        self.go_live(part, _BACK, 47)
        self.do_steps(part, 47, 48, generation=2)

    def test_a_second_loss_in_the_recovery_from_the_first(self, part: Part) -> None:
        part.start()
        self.go_live(part, _STARTED, 0)
        self.do_steps(part, 0, 47)
        part.begin(StepInfo(47, 1))
        self.interrupt(part, Interruption())
        part.settle(_state(_LOST))
        part.report(StatusReported(rank=_RANK, generation=2, iteration=47, live=True))
        self.go_live(part, _BACK, 47)
        self.interrupt(part, Interruption(in_step=False))
        self.go_live(part, _BACK, 47)
        self.do_steps(part, 47, 48, generation=2)

    def test_a_replay(self, part: Part) -> None:
        """A replacement computes completed iterations again, from a checkpoint to where the others are."""
        part.start()
        part.settle(_state(_LOST))
        part.open(_state(_BACK), 20)
        for iteration in range(20, 47):
            step = StepInfo(iteration, 2, replayed=True, until=47)
            part.begin(step)
            part.completed(step)
        self.go_live(part, _BACK, 47)
        self.do_steps(part, 47, 48, generation=2)

    def test_its_report_is_that_of_the_worker(self, part: Part) -> None:
        """A report goes into the journal, and the protocol decides by it."""
        part.start()
        given = StatusReported(rank=_RANK, generation=2, iteration=47, live=True, steps=60)
        found = part.report(given)
        assert isinstance(found, StatusReported)
        core = ("rank", "generation", "iteration", "live", "steps")
        assert all(getattr(found, name) == getattr(given, name) for name in core)
        assert decoded(StatusReported, encoded(StatusReported, found)) == found, "the journal must hold it"
        ready = part.ready(WorkerReady(rank=_RANK, generation=2, replayed=3))
        assert replace(ready, replayed=3) == ready
        assert (ready.rank, ready.generation) == (_RANK, 2)

    def test_it_lets_go_without_waiting_for_others(self, part: Part) -> None:
        """The others may be gone. A part that waits for them would hold up the recovery."""
        part.start()
        self.go_live(part, _STARTED, 0)
        part.begin(StepInfo(0, 1))
        self._in_time("interrupted", lambda: part.interrupted(Interruption()))
        self._in_time("put_back", lambda: part.put_back(Interruption()))
        self._in_time("settle", lambda: part.settle(_state(_LOST)))

    def _in_time(self, name: str, call: Callable[[], None]) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name=f"conformance: {name}", daemon=True)
        thread.start()
        thread.join(_DEADLINE_S)
        assert not thread.is_alive(), f"{name}() waits for something that does not come"
        if failed:
            raise failed[0]
