"""The steps of a script's loop: one after the other, and once more what a loss has interrupted."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Iterator
from functools import partial
from types import TracebackType
from typing import ParamSpec

from swift_ft.coordination.agent_channel import agent_channel, tell_agent
from swift_ft.errors import RecoveryError, UsageError, first_line
from swift_ft.program import last_duties
from swift_ft.program.system_exit import SessionExit, is_of_signal
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.epoch_top import EpochTop
from swift_ft.runtime.hooks.between import Between
from swift_ft.runtime.iterations import Iterations
from swift_ft.runtime.records import Records
from swift_ft.runtime.script.script_phases import ScriptPhase, ScriptPhases
from swift_ft.torch_adapters.abortable_waits import ABORTED
from swift_ft.torch_adapters.comm_errors import in_doubt, may_come_of_abort
from swift_ft.torch_adapters.step_failures import step_failures

_logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Step:
    """One iteration. ``with step:`` suppresses the errors of a peer's death and no others.

    Whether the step is complete is asked of its communication: what failed has interrupted it, also if the
    script has caught the error, or has raised another one in its place. So has an abort that raised nothing,
    whatever the script made of the numbers that it read then. Where the script calls ``sys.exit()`` in such a
    step, its process begins again.

    Attributes:
        index: the iteration, counted from 0. Look batches up by it, so that a repeated or replayed step sees
            the same data: another batch is an error.
        replayed: the step takes its messages from the log. Its results existed before.
        index_in_epoch: the same, counted from the beginning of an epoch of ``session.epochs()``.
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
        self._index_in_epoch = index
        self.caught = False
        self._records: list[Callable[[], object]] = []

    @property
    def index(self) -> int:
        """The iteration, counted from 0."""
        self._batches.index_read()
        return self._index

    @property
    def index_in_epoch(self) -> int:
        """The same, counted from the beginning of an epoch of ``session.epochs()``."""
        self._batches.index_read()
        return self._index_in_epoch

    def once(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function when the step is complete, unless that is known to be done for this iteration.

            step.once(writer.add_scalar, "loss", loss.item(), step.index)

        So a log has one record of each iteration, also where steps are repeated, replayed, or all return to a
        checkpoint: what comes in this worker's place knows how far it was. A record comes twice where this
        worker dies before others have heard of the call, where nobody who has is left, and after
        ``--resume``. It is missing where this worker is lost, or interrupted, in a step that another replica
        has completed. Write the iteration with it, and keep one of each number.

        Args:
            function: writes a record. It must not communicate.
            args: for it. Values, not tensors that the next step changes.
            kwargs: for it.
        """
        self._records.append(partial(function, *args, **kwargs))

    def __enter__(self) -> Step:
        """Begin the step."""
        self._entered = True
        self._phases.begin_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the step. The recovery begins outside of this block, whose traceback holds on to the group."""
        self._phases.end_step(failed=error is not None)
        self._batches.end()
        # Nothing follows from what an abort has left: not that the script is wrong, nor that bits differ.
        void = error is not None and may_come_of_abort(error)
        if isinstance(error, RecoveryError) and not void:
            # Its traceback refers to the group's operations, whose connections have to end (decision 24).
            self._cause, self._failure = str(error), error.with_traceback(None)
        elif error is not None and self._is_connection_error(error):
            self._cause = first_line(error)
        elif void:
            self._cause, self.caught = ABORTED, step_failures.cause is not None
        # Not KeyboardInterrupt, nor an end at a signal: these do not come of what the step was given.
        elif error is None or isinstance(error, Exception) or _exits_by_itself(error):
            self._ask_communication(error)
        # A device may still be computing, and fail when it is waited for.
        if error is None and self._cause is None:
            self._cause = self._finish_on_device()
        self._left = error is None and self._cause is None
        return self._cause is not None and (void or not isinstance(error, SystemExit))

    def _ask_communication(self, error: BaseException | None) -> None:
        """The script knows of no failure, or has made something else of it.

        Raises:
            SwiftError: one that was raised in the step already.
        """
        failed, step_failures.error = step_failures.error, None
        if failed is not None and may_come_of_abort(failed):
            self._cause, self.caught = ABORTED, step_failures.cause is not None
        elif isinstance(failed, RecoveryError):
            self._cause, self._failure = str(failed), failed.with_traceback(None)
        elif failed is not None and (
            error is None or error.__cause__ is failed or isinstance(error, SystemExit)
        ):
            raise failed
        elif step_failures.cause is not None:
            self._cause, self.caught = step_failures.cause, True
        elif isinstance(error, SystemExit) and in_doubt():
            self._cause = ABORTED


def _exits_by_itself(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not is_of_signal(error)


class Loop:
    """A script's loop over steps, or over epochs and the steps of each.

    The last step of an epoch ends when the script asks for the next epoch: the lines between belong to it,
    and are run again if it is. So a state is always one from within an epoch, or from the beginning of the
    next one.

        epochs(): 0 ────────────────────────────▶ 1 ───────▶ ... ─▶ all workers are done
                    └▶ steps(): 0 ─▶ 1 ─▶ 2 ─┐    └▶ steps(): 3 ─▶ ...
                                 the script's │    ▲
                                 lines at its └────┘ step 2 is complete
                                 end

    Args:
        runner: does what is around each step.
        between: says whether training ends early.
        phases: learns where in its loop the script is.
        top: runs the lines at the top of an epoch again where that has to be.
        records: gives the records of complete steps.
    """

    def __init__(
        self,
        runner: Iterations,
        between: Between,
        phases: ScriptPhases,
        top: EpochTop,
        records: Records,
    ) -> None:
        self._runner = runner
        self._between = between
        self._phases = phases
        self._top = top
        self._epochs = top.epochs
        self._records = records
        # Within one epoch:
        self._epoch = 0
        self._asked = False  # the script has asked for its steps
        self._end_at = 0  # the iteration that is complete with its last step
        self._step: Step | None = None  # the one that was yielded last, until it is complete or interrupted
        self._finished = False

    def steps(self, iterations: int) -> Iterator[Step]:
        """Yield the steps up to an iteration, until every worker has completed the last one.

        Args:
            iterations: that the script asks for in all.

        Raises:
            UsageError: a step was not entered.
        """
        with self._in_loop():
            while True:
                if not self._is_ready():
                    continue
                # Asked each time, since a function between two steps may end training.
                end = iterations + self._between.stop.extra
                if self._is_over() or (self._runner.iteration >= end and not self._runner.replaying):
                    if self._runner.finish():
                        return
                    continue
                self._end((yield from self._take()))

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of epochs, from 0; one that a loss leads back to is yielded again.

        Args:
            count: how many epochs there are.

        Raises:
            UsageError: the script did not take all steps of an epoch.
        """
        with self._in_loop():
            while not self._finished:
                if not self._is_ready():
                    continue
                if self._is_over() or (self._epochs.number >= count and not self._runner.replaying):
                    self._finished = self._runner.finish()
                    continue
                self._epoch, self._asked = self._epochs.number, False
                self._top.begins(self._runner.iteration)
                self._phases.phase = ScriptPhase.OUTSIDE
                yield self._epoch
                self._phases.phase = ScriptPhase.OVER
                self._end_epoch()

    def _end_epoch(self) -> None:
        """The script has come to the end of an epoch's lines."""
        last = self._step
        if last is not None and last._left and last._index + 1 == self._end_at:
            self._epochs.number, self._epochs.began = self._epoch + 1, self._end_at
            self._end(last)
        elif not self._finished:
            raise UsageError(
                "An epoch of session.epochs() takes all steps of one `for step in session.steps(count):`, "
                "and this one did not: leave out `break`, give steps() the number of the epoch's steps, or "
                "end the training early with session.stop().",
                alike=True,
            )

    def steps_of_epoch(self, count: int) -> Iterator[Step]:
        """Yield the steps of the epoch that :meth:`epochs` has yielded, those that are left of it.

        Args:
            count: of this epoch's steps.

        Raises:
            UsageError: the script asks for them a second time, or for other numbers than before.
        """
        try:
            yield from self._steps_of_epoch(count)
        except SessionExit:  # the script has left nothing
            last_duties.remove(self._leave)
            raise

    def _steps_of_epoch(self, count: int) -> Iterator[Step]:
        if self._asked:
            raise UsageError("Call session.steps() once in each epoch of session.epochs().", alike=True)
        self._asked = True
        self._top.over()
        while True:
            if not self._is_ready():
                continue
            if self._epochs.number != self._epoch:
                now = self._epochs.number
                self._start_again(f"its state is of epoch {now} now and its script is in epoch {self._epoch}")
            if self._is_over():
                if self._runner.finish():
                    self._finished = True
                    return
                continue
            iteration, end = self._runner.iteration, self._epochs.began + count
            self._end_at = end
            if iteration >= end:
                raise UsageError(
                    f"session.steps({count}) is given for epoch {self._epoch}, of which "
                    f"{iteration - self._epochs.began} steps are complete: give the same number as before.",
                    alike=True,
                )
            if why := self._top.settle(iteration):
                self._start_again(why)
            if iteration + 1 == end:
                self._top.last_step_begins(iteration)
            step = yield from self._take(repeatable=iteration + 1 != end)
            if step._left and iteration + 1 == end:
                self._phases.phase = ScriptPhase.OUTSIDE
                return
            self._end(step)

    def _start_again(self, why: str) -> None:
        """The script is at lines that the state is not one of, and cannot be taken out of them."""
        channel = agent_channel()
        assert channel is not None  # a replay without its job never goes back
        channel.send(lost=f"{why}: its process starts again", starts_again=True)
        os._exit(1)

    def _is_ready(self) -> bool:
        """Do all that comes before a step. False if that led elsewhere, and is to be done once more."""
        self._runner.ready_to_step()
        # What comes between two steps belongs to the iteration before, so it precedes moves and the end
        # (decision 65).
        settled = self._runner.settle()
        if step_failures.cause is not None:  # what was interrupted is put back
            step_failures.begin()
            tell_agent(interrupted="")
        return settled and not self._runner.stops_for_layout()

    def _is_over(self) -> bool:
        """Whether session.stop() has ended training."""
        stop_at = self._between.stop.at
        return stop_at is not None and self._runner.iteration >= stop_at and not self._runner.replaying

    def _take(self, *, repeatable: bool = True) -> Generator[Step, None, Step]:
        """Yield a step, and return it when the script asks for more."""
        runner = self._runner
        step = Step(
            runner.iteration,
            runner.replaying,
            runner.batches,
            runner.is_connection_error,
            self._phases,
            runner.finish_on_device,
        )
        step._index_in_epoch = runner.iteration - self._epochs.began
        self._step = step
        runner.begin(repeatable=repeatable)
        self._top.step_begins()
        self._phases.phase = ScriptPhase.OUTSIDE
        try:
            yield step
        except GeneratorExit:
            self._refuse_to_leave(step)
            raise
        self._phases.phase = ScriptPhase.OVER
        if not step._entered:
            raise UsageError("Write `with step:` around the body of the loop.", alike=True)
        return step

    def _refuse_to_leave(self, step: Step) -> None:
        """The script leaves its loop: not because of what an interrupted step has given it.

        It would go on with what follows the loop, such as its last checkpoint, as if training were over, or
        end with exit code 0. An error cannot be raised where a loop is left by ``break`` or ``return``, and
        who calls ``sys.exit()`` has tidied up by then. So the process begins again, with a state from others.
        """
        if step._cause is not None and agent_channel() is not None:
            self._start_again(f"its script has left its loop in a step that was interrupted ({step._cause})")

    def _end(self, step: Step) -> None:
        """Outside of its block: until here the traceback would have kept connections open (decision 24)."""
        self._step = None
        if not step._left:
            self._runner.interrupted(step._cause or "", step._failure, caught=step.caught)
            return
        self._runner.complete()
        if self._runner.iteration > step._index:  # it counts
            self._records.give(step._index, step._records)

    def _tell_interrupted(self, cause: str) -> None:
        """Tell the agent, which then takes exit code 0 for a loss: ``os._exit(0)`` asks nobody."""
        if self._phases.phase in (ScriptPhase.STEP, ScriptPhase.HOOK):
            tell_agent(interrupted=cause)

    def _leave(self) -> None:
        """The script has ended, and its loop had not: by ``break``, ``return`` or ``sys.exit(0)``."""
        if self._step is not None:  # some variable still holds the loop
            self._refuse_to_leave(self._step)
        _logger.warning(
            "The script has left its loop in iteration %d, which does not count: nothing of it is saved or "
            "recorded. session.stop() ends a training after a complete iteration.",
            self._runner.iteration,
            extra={"event": "loop_left", "iteration": self._runner.iteration},
        )
        self._runner.leave()

    @contextlib.contextmanager
    def _in_loop(self) -> Iterator[None]:
        left = False
        try:
            tell_agent(in_loop=True)
            step_failures.tell = self._tell_interrupted
            last_duties.add(self._leave)
            yield
        except (GeneratorExit, SystemExit) as end:
            left = not isinstance(end, SessionExit)
            raise
        finally:
            if not left:  # it is over, or has failed
                last_duties.remove(self._leave)
            self._phases.phase = ScriptPhase.OVER
            tell_agent(in_loop=False)  # what the script does now may take its time
