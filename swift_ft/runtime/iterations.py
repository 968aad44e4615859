"""One worker's iterations: carries out what its core decides, in the thread of the user's loop."""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.errors import RecoveryError
from swift_ft.recovery.job_state import State
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.device_part import Device
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.flow import perform
from swift_ft.runtime.worker.ports import Links, Replays


class Iterations:
    """Runs iteration after iteration, and recovers in between.

    Args:
        core: decides.
        links: are broken where other workers stop before the next iteration.
        replays: whether the next step is a replayed one.
        device: where a step's failure may show late.
        batches: compares the batches of repeated iterations.
        is_connection_error: whether an exception in the body of a step comes from broken communication.
    """

    def __init__(
        self,
        core: WorkerCore,
        links: Links,
        replays: Replays,
        device: Device,
        batches: BatchCheck,
        is_connection_error: Callable[[BaseException], bool],
    ) -> None:
        self._core = core
        self._links = links
        self._replays = replays
        self.finish_on_device = device.finish_step
        self.batches = batches
        self.is_connection_error = is_connection_error

    @property
    def iteration(self) -> int:
        """Iterations that the state has completed."""
        return self._core.status.iteration

    @property
    def replaying(self) -> bool:
        """Whether the next step takes its messages from the log, to rebuild the state."""
        return self._replays.active

    def start(self) -> None:
        """Become part of the job, whether or not other workers train already."""
        self._core.parts.start()
        # A start is a recovery, too: all report, and the plan says with what each begins.
        perform(self._core.recover())

    def on_change(self, state: State) -> None:
        """End an iteration that others do not begin, since layers move before it. In the journal thread."""
        pending = state.layouts.pending
        # A worker that has begun it would wait for messages that are never sent (decision 15).
        if pending is not None and pending.iteration == self._core.next and not self.replaying:
            self._links.abort()

    def ready_to_step(self) -> None:
        """Recover first, if a loss is already known."""
        perform(self._core.ready_to_step())

    def settle(self) -> bool:
        """Do what the script does between two steps, if that is due. False if a loss interrupted it."""
        return perform(self._core.settle())

    def stops_for_layout(self) -> bool:
        """Whether all workers stop before the next iteration, because layers move. If so, recover first."""
        return perform(self._core.stops_for_layout())

    def begin(self, *, repeatable: bool = True) -> None:
        """The step of the current iteration begins.

        Args:
            repeatable: it may be run again right after it.
        """
        self._core.begin(repeatable=repeatable)

    def complete(self) -> None:
        """The step of the current iteration is done. It counts, unless it is to be run again."""
        perform(self._core.completed())

    def interrupted(self, cause: str, failure: RecoveryError | None, *, caught: bool = False) -> None:
        """The step was interrupted: see :meth:`swift_ft.runtime.worker.core.WorkerCore.interrupted`."""
        perform(self._core.interrupted(cause, failure, caught=caught))

    def leave(self) -> None:
        """The script leaves its loop before the end, and may not come back."""
        perform(self._core.leave())

    def finish(self) -> bool:
        """Wait until all workers have completed the last iteration. False if there are more steps to run."""
        return perform(self._core.finish())
