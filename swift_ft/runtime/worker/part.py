"""The interface of a worker's parts: each is one way in which a worker is protected, measured or watched.

The worker calls all its parts at each of these moments, in a declared order (`order.py`). A part overrides
the methods of the moments that it needs. What it needs besides it is given when it is made
(`runtime/assembly.py`); other parts it does not know.

the loop         start
one step         begin ─▶ completed ─▶ boundary          a loss   interrupted ─▶ put_back
a verified one   begin ─▶ again ─▶ begin ─▶ completed ─▶ boundary
after a loss     settle ─▶ report ─▶ (idle) ─▶ open ─▶ ready ─▶ prepare ─▶ open ─▶ join ─▶ live
the end          finish ─▶ close
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_ft.recovery.events import StatusReported, WorkerReady
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan, Task

if TYPE_CHECKING:  # its room needs torch, and the core of a worker does not
    from swift_ft.logging.stats import IterationStats


@dataclass(slots=True)
class StepInfo:
    """A step of the script's loop.

    Attributes:
        iteration: its number, from 0.
        generation: in which it runs.
        replayed: it takes its messages from the log, to rebuild the state.
        until: iterations that the state will have completed after the replay; 0 in a live step.
        repeatable: the step may be run again right after it. The last one of an epoch may not: the script's
            lines after it belong to it.
        computation: which computation this is of a step that is verified, from 1; 0 where it is not.
        stats: what it cost, once it is completed. The part that measures comes before all that read this.
    """

    iteration: int
    generation: int
    replayed: bool = False
    until: int = 0
    repeatable: bool = True
    computation: int = 0
    stats: IterationStats | None = None

    @property
    def completed(self) -> int:
        """Iterations that the state has completed after this step."""
        return self.iteration + 1

    @property
    def cost(self) -> IterationStats:
        """Its cost, once it is completed."""
        assert self.stats is not None
        return self.stats


@dataclass(frozen=True, slots=True)
class Interruption:
    """An interruption by a broken connection.

    Attributes:
        in_step: a step; False for a function of the script between two steps, which is not put back.
        caught: the script has caught the error, and may have updated with gradients of its own.
    """

    in_step: bool = True
    caught: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """The demands of a recovery on this worker.

    Attributes:
        rank: this worker.
        state: the job's, in which the plan was made.
        plan: tasks for all workers.
        task: this worker's.
    """

    rank: int
    state: State
    plan: Plan
    task: Task

    @classmethod
    def of(cls, rank: int, state: State) -> Round:
        """The round of a state that has a plan."""
        assert state.plan is not None
        return cls(rank, state, state.plan, state.plan.tasks[rank])


class Part:
    """One part of a worker. All methods are called in the training thread.

    Attributes:
        name: its place in the declared order; one that is not there comes after all that are.
    """

    name = ""

    def start(self) -> None:
        """The script's loop begins: from now on this worker is a part of the job."""

    def begin(self, step: StepInfo) -> None:
        """A step begins, or is repeated."""

    def again(self, step: StepInfo) -> None:
        """The script has run a step that is verified, and runs it again: put back what it changed."""

    def completed(self, step: StepInfo) -> None:
        """The step is complete. May raise, which ends the script: it did what no recovery could repeat."""

    def boundary(self, step: StepInfo) -> None:
        """All that belongs to a live step is done, functions of the script after it included."""

    def why_checkpoint(self, committed: int | None) -> str:
        """Why a checkpoint should come before the regular one; empty if none should.

        Args:
            committed: iterations that the last committed one has; None without one.
        """
        return ""

    def pause(self) -> None:
        """No live step runs from now on, until one begins."""

    def interrupted(self, interruption: Interruption) -> None:
        """Communication has ended. Let go of what is under way; must not wait for other workers.

        Called in the reverse order: what began last ends first.
        """

    def put_back(self, interruption: Interruption) -> None:
        """Nothing of the interrupted step is under way any more: put back what it changed."""

    def settle(self, state: State) -> None:
        """A report is asked for: what others may read must be there before it."""

    def report(self, report: StatusReported) -> StatusReported:
        """Add to the report of this worker what this part knows."""
        return report

    def idle(self) -> None:
        """The report is written, and those of others are not: time for what may be needed next."""

    def open(self, state: State, begin: int) -> None:
        """A generation begins, with this iteration as its first one."""

    def ready(self, ready: WorkerReady) -> WorkerReady:
        """Add what this worker's way to the plan's iteration took."""
        return ready

    def prepare(self, round: Round) -> None:
        """All are ready: do what can be done before the group is formed.

        Raises:
            RecoveryError: it cannot be done.
        """

    def join(self, round: Round) -> str | None:
        """The group is formed: exchange what has to be exchanged before the first step.

        Returns:
            Why that was interrupted; None if it was not.

        Raises:
            RecoveryError: what came cannot be used.
        """
        return None

    def live(self, round: Round) -> None:
        """Training goes on in this generation."""

    def finish(self) -> None:
        """The last iteration is done here: what others may need until they have done it must be there."""

    def close(self) -> None:
        """All workers have done the last iteration. Called in the reverse order."""
