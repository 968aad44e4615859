"""The surroundings of a worker's core, as it sees them. Tests give it others.

What may wait is only called by whoever drives the core's flows (`flow.py`); the core asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from swift_ft.errors import SwiftError
from swift_ft.observe.spans import Recorder, recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Task
from swift_ft.runtime.worker.part import StepInfo


class Job(Protocol):
    """The job as this worker knows it. `Participant` is one."""

    @property
    def state(self) -> State:
        """The newest one."""

    def order(self, state: State) -> WorkerOrder:
        """Of this worker."""

    def next_order(self) -> tuple[WorkerOrder, State]:
        """Wait until there is something to do."""

    def append(self, event: ev.Event) -> State:
        """Write an event into the journal, and wait for the state that follows from it."""

    def generation_over(self, state: State) -> bool:
        """Whether the generation whose group this worker is in is over."""

    def is_cancelled(self) -> bool:
        """The same, now."""

    def replay_cancelled(self, asked_in: int) -> bool:
        """Whether the replay of a plan from the reports of a generation is not asked for any more."""

    def wait_for_others(self) -> State:
        """Wait until all workers have stopped, since layers move, or this generation is over."""

    def wait_for_finish(self) -> State:
        """Wait until all workers have completed the last iteration, or this generation is over."""


class Links(Protocol):
    """The connections of this worker. `Groups` is one."""

    def enter(self, generation: int) -> bool:
        """Form the group of a generation. False if that failed; then another one is due."""

    def keep(self) -> None:
        """Be done in the group. Others may still read what was sent."""

    def leave(self) -> None:
        """Leave the group, if there is one."""

    def leave_generation(self) -> None:
        """Leave the group of a generation, but not one that the script has made."""

    def abort(self) -> None:
        """Break what waits in the group."""

    def destroy_left(self) -> None:
        """Training goes on: free what was left."""

    def on_connection_broken(self, cause: str) -> None:
        """Leave the group, and wait until the journal says which machine died."""


class Replays(Protocol):
    """Rebuilds this worker from messages, and helps others.

    Attributes:
        until: iterations that the state will have completed at the end of its replay.
        parts_from: from which of the functions between two steps on they are called after it; None for none.
        replayed: iterations of it that are replayed and not reported yet.
    """

    until: int
    parts_from: int | None
    replayed: int

    @property
    def active(self) -> bool:
        """Whether the next step is a replayed one."""

    @property
    def behind(self) -> bool:
        """Whether the state is one that other workers have left behind."""

    @property
    def joint(self) -> bool:
        """Whether other workers take part in it."""

    def begin(self, state: State, task: Task, shared: ParallelReplay | None) -> bool:
        """Connect with those that take part. False if another generation is due."""

    def help(self, state: State, shared: ParallelReplay, iteration: int) -> bool:
        """Compute for those that replay. False if it was interrupted."""

    def end(self) -> None:
        """It is complete, or it cannot continue."""


class Layers(Protocol):
    """Moves the layers of a model, where they can move."""

    def move(self, state: State) -> bool:
        """Exchange layers with others, aside. False if another generation is due."""


class Checkpoints(Protocol):
    """Loads and saves this worker's state."""

    def load(self, state: State, task: Task) -> None:
        """Load what a task names, from the store or from another machine's memory."""

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint follows the completion of this many iterations."""

    def regular(self, iteration: int) -> bool:
        """Whether that is so without any request: then all workers save."""

    def save(self, iteration: int, *, replaying: bool = False) -> None:
        """Begin to save, unless that checkpoint is committed.

        Raises:
            DivergenceError: the state is not what the lost worker had saved.
        """

    def request(self, iteration: int, generation: int, reason: str) -> None:
        """Ask for one of all workers before the regular one."""

    def leave(self, iteration: int) -> None:
        """Wait for the commit of the last regular one, as long as it can come, and for the clean-up."""

    def failure(self, error: SwiftError, generation: int) -> ev.Event:
        """The event that says why this worker cannot do its task."""

    def flush_notes(self) -> None:
        """Wait until what a replacement reads is written."""


class Hooks(Protocol):
    """Calls the functions of the script between two steps (``session.between``).

    Attributes:
        repeats: the next one was begun before a loss.
    """

    repeats: bool

    def check(self) -> None:
        """Raise what workers were found to differ in."""

    def due(self, iteration: int) -> int:
        """The number of functions that follow the completion of this many iterations."""

    def do(self, iteration: int, position: int, generation: int) -> str | None:
        """Call one of them. Returns why it was interrupted; None if it was not."""

    def take_over(self, iteration: int, until: int, *, begin: int = 0) -> None:
        """Let the results of some of them have the consequences that they had."""


class Handover(Protocol):
    """Hands the state of one world to the next (`recovery/worlds.py`)."""

    def make_ready(self) -> None:
        """Do all that can be done before there is a state to take, while the present world trains."""

    def offer(self, state: State, iteration: int) -> ev.Event:
        """Serve this worker's state to the next world, or a copy. Returns what the journal is to be told.

        Raises:
            SwiftError: it is not there, not what was copied, or a value of it cannot be saved.
        """

    def withdraw(self) -> None:
        """The next world does not take over: serve the state no longer."""

    def take(self, state: State) -> ev.Event:
        """Load the state from what the present world offers. Returns what the journal is to be told.

        Raises:
            CheckpointError, RecoveryError: it cannot be loaded.
        """


@dataclass(frozen=True, slots=True)
class Judgement:
    """The fate of a step that is verified.

    Attributes:
        again: it is computed once more.
        cause: why the comparison was interrupted; None if it was not.
    """

    again: bool = False
    cause: str | None = None


class Verification(Protocol):
    """Has some steps computed again, and compares (`runtime/verify/`)."""

    def computation(self, step: StepInfo) -> int:
        """The number of the computation of a step that begins, from 1; 0 for a step that is not verified."""

    def judge(self, step: StepInfo) -> Judgement:
        """The script has run a step that is verified: all workers compare, and decide alike."""


class NoVerification:
    """No step is computed again."""

    def computation(self, step: StepInfo) -> int:
        """None is verified."""
        return 0

    def judge(self, step: StepInfo) -> Judgement:
        """None is verified."""
        raise AssertionError("a step is judged, and none is verified")


class NoLayers:
    """No layer can move."""

    def move(self, state: State) -> bool:
        """No plan asks for it."""
        raise AssertionError("a plan moves layers of a model that has none to move")


class NoHandover:
    """No other world follows."""

    def make_ready(self) -> None:
        """Nothing will come."""

    def offer(self, state: State, iteration: int) -> ev.Event:
        """No change asks for it."""
        raise AssertionError("another world takes over from a worker that cannot hand its state over")

    def withdraw(self) -> None:
        """Nothing is served."""

    def take(self, state: State) -> ev.Event:
        """No change asks for it."""
        raise AssertionError("another world takes over with a worker that cannot take its state")


class NoReplays:
    """Nothing is rebuilt from messages: there is no pipeline."""

    until = 0
    parts_from: int | None = None
    replayed = 0
    active = behind = joint = False

    def begin(self, state: State, task: Task, shared: ParallelReplay | None) -> bool:
        """No plan asks for it."""
        raise AssertionError("a plan replays on a worker without a pipeline")

    def help(self, state: State, shared: ParallelReplay, iteration: int) -> bool:
        """No plan asks for it."""
        raise AssertionError("a plan asks a worker without a pipeline to help")

    def end(self) -> None:
        """Nothing has begun."""


@dataclass(frozen=True, slots=True)
class Ports:
    """All surroundings of a core. Its recoveries are recorded."""

    job: Job
    links: Links
    replays: Replays
    layers: Layers
    checkpoints: Checkpoints
    hooks: Hooks
    handover: Handover = field(default_factory=NoHandover)
    verification: Verification = field(default_factory=NoVerification)
    recorder: Recorder = recorder
