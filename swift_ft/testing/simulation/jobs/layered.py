"""A simulated pipeline whose layers move between its stages while it trains, and while machines are lost.

What a layer is, is not simulated: a worker knows the layout of its own layers. It must be the job's whenever
it trains, and logs of one layout must never be read in another (that is another history).
"""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import StageLayers, even_layout
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.testing.simulation.connection import Mode
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import Violation
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import Host, World

__all__ = ["LayeredJob", "LayeredWorker"]

_LAYERS_PER_STAGE = 3
_REQUESTS = 0.08
"""How often a worker asks for another layout after an iteration: now and then so late that others go on.

In a real job only worker 0 asks. The first stage stops in time then, and no other one gets far without it.
"""
_DECLINES = 0.02


class LayeredJob(SimulatedJob):
    """One run; see :class:`SimulatedJob`."""

    patience = 1.0

    def __init__(
        self, seed: int, machines: int, workers: int = 1, *, trace: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(seed, machines, workers, trace=trace)
        self.settings.checkpoint_every = self.rng.choice((2, 3, 5))
        self.fault_timing.budget = self.rng.choice((0, 1, 2, 2, 3, 4))

    def make_worker(self, machine: Machine, rank: int, started_in: int) -> Worker:
        """Start one worker."""
        return LayeredWorker(self, machine, rank, started_in)


class LayeredWorker(Worker):
    """One worker, a small version of `runtime/elastic/repartition.py`.

    Attributes:
        layout: of the layers that it has.
        aside: the layout whose layers have come, and are not yet its own.
    """

    def __init__(self, world: World, machine: Host, rank: int, started_in: int) -> None:
        super().__init__(world, machine, rank, started_in)
        self.layers = _LAYERS_PER_STAGE * world.world_size
        self.layout: StageLayers = even_layout(self.layers, world.world_size)
        self.aside: StageLayers | None = None
        self._acts[Mode.STOPPED] = self._stopped
        self._acts[Mode.MOVE] = self._move

    # ----------------------------------------------------------------------------------------- recovery

    def _report(self, state: State) -> None:
        self.settle(state)
        super()._report(state)

    def _execute(self, state: State) -> None:
        assert state.plan is not None
        if state.plan.new_layout is None:
            super()._execute(state)
            return
        self.active_generation, self.expected_order = state.generation, WorkerOrder.EXECUTE
        self.replay_members = tuple(range(state.world_size))
        self.mode = Mode.MOVE
        group = self.group
        assert group is not None
        group.ready[self.rank] = self.content
        self.append(ev.GroupAwaited(rank=self.rank, generation=state.generation))

    def _move(self, state: State) -> bool:
        """Give and take layers, once all workers are connected."""
        group, plan = self.group, state.plan
        assert group is not None
        if self.generation_over(state):
            self.leave_group()
            self.mode = Mode.RECOVER
            return True
        if group.broken or group.gone:
            self.fail_communication()
            return True
        if len(state.round.awaiting) < state.world_size:
            return False
        if self.rank not in group.joined:
            group.joined.add(self.rank)
            self.world.provoke_fault(0.5, (1, 2, 4, 8))
            return True
        if len(group.joined) < state.world_size:
            return False
        assert plan is not None
        assert plan.new_layout is not None
        if len({content and content.iteration for content in group.ready.values()}) > 1:
            raise Violation(f"layers move between workers at different iterations: {group.ready}")
        self.detach_from_group()
        self.mode = Mode.RECOVER
        if self.world.rng.random() < _DECLINES:
            self.world.seen["declined a layout"] += 1
            self.append(ev.LayoutDeclined(rank=self.rank, generation=state.generation, reason="memory"))
            return True
        self.aside = plan.new_layout
        self.append(ev.WorkerReady(rank=self.rank, generation=state.generation))
        return True

    def settle(self, state: State) -> None:
        """What came aside becomes its own, if the job has agreed on it."""
        agreed, aside, self.aside = self.agreed(state), self.aside, None
        if aside is not None and aside == agreed != self.layout:
            self.layout = aside
            self.world.seen["layers moved"] += 1

    def agreed(self, state: State) -> StageLayers:
        """The layout of the job."""
        return state.layouts.current or even_layout(self.layers, self.world.world_size)

    def _load(self, state: State, iteration: int) -> bool:
        self.layout = self.agreed(state)  # each layer from the part that has it
        return super()._load(state, iteration)

    def _prepare(self, state: State) -> None:
        self.settle(state)
        if self.layout != self.agreed(state):
            raise Violation(f"{self} goes live with the layers of {self.layout}, not {self.agreed(state)}")
        super()._prepare(state)

    # --------------------------------------------------------------------------------------------- live

    def _run(self, state: State) -> bool:
        pending = state.layouts.pending
        at = None if self.content is None else self.content.iteration
        if pending is not None and pending.iteration == at and not self.generation_over(state):
            if self.substep:
                self.world.seen["stopped in an iteration that others do not begin"] += 1
            self.abandon_step()
            self.mode = Mode.STOPPED
            assert self.active_generation is not None
            self.append(
                ev.LayoutBoundaryReached(rank=self.rank, generation=self.active_generation, iteration=at)
            )
            return True
        return super()._run(state)

    def _stopped(self, state: State) -> bool:
        """Wait until all workers have stopped, or one of them is lost, or that was the last iteration."""
        if not self.generation_over(state):
            if state.membership.ended:  # another script has left its loop: it will never stop
                self.fail_communication()
                return True
            if state.layouts.pending is not None:
                return False
            self.mode = Mode.RUN
            return True
        self.leave_group()
        self.mode = Mode.RECOVER
        return True

    def _maybe_request_checkpoint(self) -> None:
        super()._maybe_request_checkpoint()
        if self.active_generation is None or self.world.rng.random() > _REQUESTS:
            return
        assert self.content is not None
        counts = [1] * self.world.world_size
        for _ in range(self.layers - len(counts)):
            counts[self.world.rng.randrange(len(counts))] += 1
        self.append(
            ev.LayoutRequested(
                rank=self.rank,
                generation=self.active_generation,
                iteration=self.content.iteration + self.world.rng.choice((1, ev.REQUESTED_AHEAD)),
                layers=tuple(counts),
            )
        )
