"""The surroundings of a worker's core in a simulated job: see `swift_ft/runtime/worker/ports.py`."""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.errors import SwiftError
from swift_ft.observe.spans import Recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Task
from swift_ft.runtime.worker.failures import failure_event
from swift_ft.runtime.worker.ports import Ports
from swift_ft.testing.simulation.connection import Mode, Pending, Ticks
from swift_ft.testing.simulation.replay import ReplayingProcess


def ports_of(worker: ReplayingProcess) -> Ports:
    """The surroundings of a worker. What takes several steps of the simulation is :data:`Ticks`."""
    return Ports(
        _Job(worker),  # type: ignore[arg-type]
        _Links(worker),  # type: ignore[arg-type]
        _Replays(worker),  # type: ignore[arg-type]
        _Layers(worker),  # type: ignore[arg-type]
        _Checkpoints(worker),
        _NoHooks(),
        _Handover(worker),  # type: ignore[arg-type]
        recorder=_NothingRecorded(),
    )


class _Job:
    def __init__(self, worker: ReplayingProcess) -> None:
        self._worker = worker
        self.order: Callable[[State], WorkerOrder] = worker.order
        self.append = worker.write
        self.generation_over = worker.generation_over

    @property
    def state(self) -> State:
        return self._worker.view

    def next_order(self) -> Ticks[tuple[WorkerOrder, State]]:
        worker = self._worker
        worker.mode = Mode.RECOVER
        while (order := worker.order(worker.view)) == WorkerOrder.HOLD:
            yield Pending.IDLE
        if order == WorkerOrder.STOP:
            worker.exit(1)
            yield Pending.ACTED
        return order, worker.view

    def is_cancelled(self) -> bool:
        return self._worker.generation_over(self.state)

    def replay_cancelled(self, asked_in: int) -> bool:
        state = self.state
        return self.order(state) != WorkerOrder.EXECUTE or state.round.asked_in != asked_in

    def wait_for_others(self) -> Ticks[State]:
        worker = self._worker
        worker.mode = Mode.STOPPED
        while not self._may_go_on(worker.view):
            yield Pending.IDLE
        return worker.view

    def _may_go_on(self, state: State) -> bool:
        # Another change may have been planned since this one was given up: nobody waits for it here.
        pending, here = state.layouts.pending, self._worker.core.status.iteration
        stops_here = pending is not None and pending.iteration == here
        return self.generation_over(state) or not stops_here or bool(state.membership.ended)

    def wait_for_finish(self) -> Ticks[State]:
        worker = self._worker
        worker.mode = Mode.FINISHING
        while not (worker.view.all_finished or self.generation_over(worker.view)):
            yield Pending.IDLE
        return worker.view


class _Links:
    def __init__(self, worker: ReplayingProcess) -> None:
        self._worker = worker
        self.enter = worker.enter
        self.leave = worker.leave_group
        self.keep = worker.detach_from_group

    def leave_generation(self) -> None:
        if self._worker.active_generation is not None:
            self._worker.leave_group()

    def abort(self) -> None:
        """Nothing is under way any more."""

    def destroy_left(self) -> None:
        """A group that was left takes nothing."""

    def on_connection_broken(self, cause: str) -> Ticks[None]:
        return self._worker.confirm_loss()


class _Replays:
    parts_from = None
    replayed = 0

    def __init__(self, worker: ReplayingProcess) -> None:
        self._worker = worker
        self.end = worker.end_replay

    @property
    def until(self) -> int:
        return self._worker.replay_until

    @property
    def active(self) -> bool:
        return self._worker.replaying

    @property
    def behind(self) -> bool:
        return self._worker.replaying and not self._worker.completes_alone

    @property
    def joint(self) -> bool:
        return bool(self._worker.replay_members) or self._worker.mode == Mode.CONFIRM

    def begin(self, state: State, task: Task, shared: ParallelReplay | None) -> Ticks[bool]:
        self._worker.core.status.known = True
        return self._worker.begin_replay(state, task, shared)

    def help(self, state: State, shared: ParallelReplay, iteration: int) -> Ticks[bool]:
        return self._worker.help(state, shared)


class _Layers:
    def __init__(self, worker: ReplayingProcess) -> None:
        self._worker = worker

    def move(self, state: State) -> Ticks[bool]:
        return self._worker.move_layers(state)


class _Handover:
    def __init__(self, worker: ReplayingProcess) -> None:
        self._worker = worker
        self.take = worker.take

    def make_ready(self) -> None:
        pass

    def offer(self, state: State, iteration: int) -> ev.Event:
        return self._worker.offer(state, iteration)

    def withdraw(self) -> None:
        self._worker.withdraw()


class _Checkpoints:
    def __init__(self, worker: ReplayingProcess) -> None:
        self._worker = worker
        self.load = worker.load

    def due(self, iteration: int) -> bool:
        return self._worker.checkpoint_due(iteration)

    def regular(self, iteration: int) -> bool:
        return iteration % self._worker.world.settings.checkpoint_every == 0

    def save(self, iteration: int, *, replaying: bool = False) -> None:
        self._worker.save(self._worker.view)

    def leave(self, iteration: int) -> None:
        raise AssertionError("simulated scripts take all steps")

    def request(self, iteration: int, generation: int, reason: str) -> None:
        at = iteration + ev.REQUESTED_AHEAD
        self._worker.append(
            ev.CheckpointRequested(rank=self._worker.rank, iteration=at, generation=generation)
        )

    def failure(self, error: SwiftError, generation: int) -> ev.Event:
        return failure_event(error, self._worker.rank, generation)

    def flush_notes(self) -> None:
        """Nothing is noted."""


class _NoHooks:
    repeats = False

    def check(self) -> None:
        """Nothing differs."""

    def due(self, iteration: int) -> int:
        return 0

    def do(self, iteration: int, position: int, generation: int) -> str | None:
        raise AssertionError("the script does nothing between two steps")

    def take_over(self, iteration: int, until: int, *, begin: int = 0) -> None:
        """Nothing follows."""


class _NothingRecorded(Recorder):
    """There is no clock."""

    def __init__(self) -> None:
        super().__init__(now=lambda: 0)

    def begin(self, since: int | None = None, *, awake: bool = False) -> None:
        """Nothing is recorded."""
