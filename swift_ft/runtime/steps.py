"""The steps of a script's loop: one after the other, and once more what a loss has interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from swift_ft.coordination.agent_channel import agent_channel
from swift_ft.errors import RecoveryError, UsageError, first_line
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.hooks.between import Between
from swift_ft.runtime.iterations import Iterations
from swift_ft.runtime.script.script_phases import ScriptPhase, ScriptPhases
from swift_ft.torch_adapters.step_failures import step_failures


class Step:
    """One iteration. ``with step:`` suppresses the errors of a peer's death and no others.

    Whether the step is complete is asked of its communication: what failed has interrupted it, also if the
    script has caught the error, or has raised another one in its place.

    Attributes:
        index: the iteration, counted from 0. Look batches up by it, so that a repeated or replayed step sees
            the same data: another batch is an error.
        replayed: the step takes its messages from the log. Its results existed before.
        caught: communication failed, and the script went on.
    """

    def __init__(
        self,
        index: int,
        replayed: bool,
        batches: BatchCheck,
        is_connection_error: Callable[[BaseException], bool],
        phases: ScriptPhases,
        finish_on_device: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._index = index
        self.replayed = replayed
        self._batches = batches
        self._entered = self._left = False
        self._is_connection_error = is_connection_error
        self._phases = phases
        self._finish_on_device = finish_on_device
        self._cause: str | None = None
        self._failure: RecoveryError | None = None
        self.caught = False

    @property
    def index(self) -> int:
        """The iteration, counted from 0."""
        self._batches.index_read()
        return self._index

    def __enter__(self) -> Step:
        """Begin the step."""
        self._entered = True
        self._phases.begin_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the step. The recovery begins outside of this block, whose traceback holds on to the group."""
        self._phases.phase = ScriptPhase.OUTSIDE
        self._batches.end()
        if isinstance(error, RecoveryError):
            # Its traceback refers to the group's operations, whose connections have to end (decision 24).
            self._cause, self._failure = str(error), error.with_traceback(None)
        elif error is not None and self._is_connection_error(error):
            self._cause = first_line(error)
        # Not SystemExit or KeyboardInterrupt: with these the script means to end.
        elif error is None or isinstance(error, Exception):
            self._ask_communication(error)
        # A device may still be computing, and fail when it is waited for.
        if error is None and self._cause is None:
            self._cause = self._finish_on_device()
        self._left = error is None and self._cause is None
        return self._cause is not None

    def _ask_communication(self, error: Exception | None) -> None:
        """The script knows of no failure, or has made something else of it.

        Raises:
            SwiftError: one that was raised in the step already.
        """
        failed, step_failures.error = step_failures.error, None
        if isinstance(failed, RecoveryError):
            self._cause, self._failure = str(failed), failed.with_traceback(None)
        elif failed is not None and (error is None or error.__cause__ is failed):
            raise failed
        elif step_failures.cause is not None:
            self._cause, self.caught = step_failures.cause, True


def steps(runner: Iterations, between: Between, phases: ScriptPhases, iterations: int) -> Iterator[Step]:
    """Yield the steps of a script's loop, until every worker has completed the last one.

    Args:
        runner: does what is around each step.
        between: says whether training ends early.
        phases: learns where in its loop the script is.
        iterations: that the script asks for in all.

    Raises:
        UsageError: a step was not entered.
    """
    try:
        _tell_agent(in_loop=True)
        while True:
            runner.ready_to_step()
            # What comes between two steps belongs to the iteration before, so it precedes moves and the end
            # (decision 65).
            if not runner.settle():
                continue
            if runner.stops_for_layout():
                continue
            # Asked each time, since a function between two steps may end training.
            last = iterations if between.stop.at is None else min(iterations, between.stop.at)
            if runner.iteration >= last and not runner.replaying:
                if runner.finish():
                    return
                continue
            step = Step(
                runner.iteration,
                runner.replaying,
                runner.batches,
                runner.is_connection_error,
                phases,
                runner.finish_on_device,
            )
            runner.begin()
            phases.phase = ScriptPhase.OUTSIDE
            yield step
            phases.phase = ScriptPhase.OVER
            if not step._entered:
                raise UsageError("Write `with step:` around the body of the loop.")
            # Outside of the block: until here the traceback would have kept connections open (decision 24).
            if step._left:
                runner.complete()
            else:
                runner.interrupted(step._cause or "", step._failure, caught=step.caught)
    finally:
        phases.phase = ScriptPhase.OVER
        _tell_agent(in_loop=False)


def _tell_agent(*, in_loop: bool) -> None:
    """Whether the script trains: what it does afterwards may take its time."""
    if (channel := agent_channel()) is not None:
        channel.send(in_loop=in_loop)
