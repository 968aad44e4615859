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
from swift_ft.recovery.plan import Task
from swift_ft.runtime.worker.part import Interruption, Round, StepInfo
from swift_ft.testing.simulation.connection import Mode, Ticks
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import Violation
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import Host, World

_LAYERS_PER_STAGE = 3
_REQUESTS = 0.08
"""The chance that a worker asks for another layout after an iteration: sometimes so late that others go on.

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
        self._moved = False

    # ----------------------------------------------------------------------------------------- recovery

    def move_layers(self, state: State) -> Ticks[bool]:
        """Give and take layers, aside, once all workers are connected."""
        self.active_generation, self.expected_order = state.generation, WorkerOrder.EXECUTE
        self.replay_members, self._moved = tuple(range(state.world_size)), False
        group = self.group
        assert group is not None
        group.ready[self.rank] = self.content
        yield from self.write(ev.GroupAwaited(rank=self.rank, generation=state.generation))
        yield from self.stay(Mode.MOVE, self._move)
        if self.mode == Mode.CONFIRM:
            yield from self.confirm_loss()
        return self._moved

    def _move(self, state: State) -> bool:
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
        self.aside, self._moved = plan.new_layout, True
        return True

    def settle(self, state: State) -> None:
        """Adopt the layout that was prepared aside, if the job has agreed on it."""
        super().settle(state)
        self._take_over(state)

    def _take_over(self, state: State) -> None:
        agreed, aside, self.aside = self.agreed(state), self.aside, None
        if aside is not None and aside == agreed != self.layout:
            self.layout = aside
            self.world.seen["layers moved"] += 1

    def agreed(self, state: State) -> StageLayers:
        """The layout of the job."""
        return state.layouts.current or even_layout(self.layers, self.world.world_size)

    def load(self, state: State, task: Task) -> None:
        """Each layer from the part that has it."""
        self.layout = self.agreed(state)
        super().load(state, task)

    def prepare(self, round: Round) -> None:
        """Have the layers of the layout in which training goes on."""
        self._take_over(round.state)
        if self.layout != (agreed := self.agreed(round.state)):
            raise Violation(f"{self} goes live with the layers of {self.layout}, not {agreed}")
        super().prepare(round)

    # --------------------------------------------------------------------------------------------- live

    def interrupted(self, interruption: Interruption) -> None:
        """Perhaps only since others have stopped."""
        super().interrupted(interruption)
        if self.mode == Mode.RUN and self.substep:
            self.world.seen["stopped in an iteration that others do not begin"] += 1

    def boundary(self, step: StepInfo) -> None:
        """Now and then it asks for another layout."""
        if self.world.rng.random() > _REQUESTS:
            return
        counts = [1] * self.world.world_size
        for _ in range(self.layers - len(counts)):
            counts[self.world.rng.randrange(len(counts))] += 1
        self.append(
            ev.LayoutRequested(
                rank=self.rank,
                generation=step.generation,
                iteration=step.completed + self.world.rng.choice((1, ev.REQUESTED_AHEAD)),
                layers=tuple(counts),
            )
        )
