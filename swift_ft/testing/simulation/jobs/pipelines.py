"""Simulated pipelines of a LayerStack that are replicas of each other, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast

from swift_ft.config.run_plan import plan_from_json
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.recovery.plan import Plan, RecoveryMode, Task
from swift_ft.runtime.worker.part import Round
from swift_ft.testing.simulation.connection import Mode, Ticks
from swift_ft.testing.simulation.faults import FAULTS
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.jobs.replica_state import ParameterValue
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import Violation
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import Host, World

_PIPELINES, _LAYERS_PER_STAGE = 2, 2
FAULTS_OF_PIPELINES = FAULTS | {
    "kill_neighbours": 2,
    "corrupt_log": 0,
    "lose_log": 0,
    "break_network": 8,
    "kill_worker": 6,
    "break_update": 0,
}


@dataclass(frozen=True, slots=True)
class LayersState:
    """The state of a worker. Those of two workers with other layers are equal if they are as far.

    Attributes:
        iteration: completed iterations.
        values: by layer of the whole model; only those of its own layers count.
        own: these layers.
    """

    iteration: int
    values: tuple[ParameterValue, ...] = field(compare=False)
    own: range = field(compare=False)


@dataclass(slots=True)
class _Shared:
    """The facts that the workers of a generation have told each other.

    Attributes:
        begun: by iteration, ranks that have begun it.
        sums: by iteration and layer, what each holder has added up.
        averaged: by iteration, ranks that have all their averages.
        clipped: by iteration, ranks that have told their pipeline the norm of their gradients.
        arrived: by transfer, ranks that take part.
        sent: by transfer, the source's state.
        live: by layer, what the first holder goes live with.
    """

    begun: dict[int, set[int]] = field(default_factory=dict)
    sums: dict[tuple[int, int], dict[int, tuple[int, int]]] = field(default_factory=dict)
    averaged: dict[int, set[int]] = field(default_factory=dict)
    clipped: dict[int, set[int]] = field(default_factory=dict)
    arrived: dict[int, set[int]] = field(default_factory=dict)
    sent: dict[int, LayersState] = field(default_factory=dict)
    live: dict[int, ParameterValue] = field(default_factory=dict)


class PipelinesJob(SimulatedJob):
    """One run; see :class:`SimulatedJob`."""

    patience = 0.8

    def __init__(
        self,
        seed: int,
        machines: int,
        workers: int = 1,
        *,
        trace: Callable[[str], None] | None = None,
        faults: Mapping[str, int] = FAULTS_OF_PIPELINES,
        shrinks: bool = False,
    ) -> None:
        self.told: dict[int, _Shared] = {}
        stages = machines * workers // _PIPELINES
        self.layers, self.min_stages = stages * _LAYERS_PER_STAGE, 1
        self.cuts: Sequence[StageLayers] = ((_LAYERS_PER_STAGE,) * stages,) * _PIPELINES
        super().__init__(seed, machines, workers, trace=trace, faults=faults, shrinks=shrinks)
        self.can_undo = self.rng.random() < 0.5
        self.clips = self.rng.random() < 0.4
        self.fault_timing.budget = self.rng.choice((0, 1, 2, 3, 4, 5, 6))

    def make_worker(self, machine: Machine, rank: int, started_in: int) -> Worker:
        """Start one worker."""
        return PipelineWorker(self, machine, rank, started_in, self)

    def _content_after(self, iterations: int) -> LayersState:
        value = ParameterValue(tuple((i, -1) for i in range(iterations)))
        return LayersState(iterations, (value,) * self.layers, range(self.layers))

    def _check_contents(self, generation: int, plan: Plan, group: list[Worker]) -> None:
        """States become equal after the group is formed; see :meth:`PipelineWorker.join`."""

    def _check_plan(self, state: State, plan: Plan) -> None:
        super()._check_plan(state, plan)
        completing = [rank for rank, task in plan.tasks.items() if task.load is None and task.replays]
        self.seen["completes alone"] += len(completing)
        self.seen["undoes"] += sum(bool(task.undo) for task in plan.tasks.values())
        if plan.mode == RecoveryMode.REPLICA:
            reached = max(s.iteration or 0 for s in state.round.statuses.values() if s.live)
            self.seen["back" if plan.resume < reached else "forward"] += 1
        if plan.mode == RecoveryMode.REPLAY:
            raise Violation("pipelines that are replicas replay nothing")


class PipelineWorker(Worker):
    """One worker. Substeps: 1 compute, 2 wait for sums, 3 wait for all, 4 clip, 5 update, 6 complete.

    Attributes:
        own: its layers.
        averages: of the iteration that was interrupted, if they were all there.
        updated: the update of the interrupted iteration is being undone.
    """

    completes_alone = True

    def __init__(self, world: World, machine: Host, rank: int, started_in: int, job: PipelinesJob) -> None:
        super().__init__(world, machine, rank, started_in)
        self._job = job
        self.layers = job.layers
        self._place(job.cuts, "")
        self.averages: tuple[int, dict[int, tuple[int, int]]] | None = None
        self._clipped: dict[int, tuple[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}  # the averages of the last update
        self.updated = False
        self._aside: dict[int, ParameterValue] = {}

    def belongs_to(self, world: int, size: int) -> None:
        """Say to which world it belongs, which may have a plan."""
        super().belongs_to(world, size)
        worlds = self.world.states[-1].worlds
        its = (
            worlds.present if worlds.change is None or worlds.present.number == world else worlds.change.world
        )
        if its.plan:
            self._place([pipeline.cut for pipeline in plan_from_json(its.plan).pipelines], its.plan)

    def _place(self, cuts: Sequence[StageLayers], plan: str) -> None:
        """Take its place in one of the pipelines."""
        self._pipelines, rank = len(cuts), self.rank
        for cut in cuts:
            if rank < len(cut):
                break
            rank -= len(cut)
        self.stage, self.pipeline, self._stages = rank, self.rank - rank, len(cut)
        self._cut = cut if plan else ()
        first, end = [*pairwise([0, *accumulate(cut)])][rank]
        self.own = range(first, end)

    @property
    def model(self) -> LayersState:
        """The state of a worker that has one."""
        assert self.content is not None
        return cast(LayersState, self.content)

    @model.setter
    def model(self, model: LayersState) -> None:
        self.content = model  # type: ignore[assignment]  # in pipelines that replay, contents are chains

    @property
    def _told(self) -> _Shared:
        assert self.active_generation is not None
        return self._job.told.setdefault(self.active_generation, _Shared())

    def _set(self, values: dict[int, ParameterValue], iteration: int) -> None:
        kept = list(self.model.values) if self.content is not None else [ParameterValue()] * self.layers
        for layer, value in values.items():
            kept[layer] = value
        self.model = LayersState(iteration, tuple(kept), self.own)

    def _put_together(self, states: Sequence[LayersState], iteration: int) -> None:
        """Take each layer from whichever state has it."""
        values = {layer: state.values[layer] for state in states for layer in state.own}
        if missing := {*self.own} - {*values}:
            raise Violation(f"{self} needs layers {sorted(missing)}, and nobody has them: {states}")
        self._set({layer: values[layer] for layer in self.own}, iteration)

    # ----------------------------------------------------------------------------------------- recovery

    def settle(self, state: State) -> None:
        """Averages are of use as long as they are those of the next iteration."""
        at, averages = self.core.status.iteration, self.averages
        if averages is not None and (averages[0] != at or self.updated):
            self.averages = None

    def _facts(self) -> dict[str, Any]:
        return {
            "stages": (self.stage,),
            "pipeline": self.pipeline,
            "pipeline_known": True,
            "holds": (f"layers {self.own}",),
            "undoable": (0, 1) if self._job.can_undo and self._last and not self.updated else (),
            "updated": (0, 1) if self.updated else (),
            "completes": self.averages is not None,
            "cut": self._cut if self.stage == 0 else (),
            "min_stages": self._job.min_stages,
        }

    def take(self, state: State) -> Ticks[ev.Event]:
        """Take each layer from a worker that offers it."""
        taken = yield from super().take(state)
        assert state.worlds.change is not None
        offers = [self.world.offers[one.address].content for one in state.worlds.change.offered.values()]
        self._put_together(cast("list[LayersState]", offers), self.model.iteration)
        return taken

    def load(self, state: State, task: Task) -> None:
        """Load a part, which cannot be undone. Of other pipelines it is in several."""
        super().load(state, task)
        assert task.load is not None
        store = self.world.store
        parts = [store.parts[path] for path in store.markers[task.load].values() if path in store.parts]
        self._put_together(cast("list[LayersState]", parts), task.load)
        self.updated, self._last, self.averages = False, {}, None

    def _replay(self, state: State) -> bool:
        """Complete the interrupted iteration, whose averages are all here."""
        iteration = self.model.iteration
        if self.averages is None or self.averages[0] != iteration:
            raise Violation(f"{self} is to complete iteration {iteration}, and has {self.averages}")
        self._apply_averages(self.averages[1])
        self.averages = None
        self._set({}, iteration + 1)
        self._step_done = True
        return True

    def prepare(self, round: Round) -> None:
        """Undo what the plan says."""
        self._follow(round)
        plan, task = round.plan, round.task
        receives = any(self.rank in transfer.targets for transfer in plan.transfers)
        if self.content is None and not receives:
            if plan.mode != RecoveryMode.START:
                raise Violation(f"{self} has no state, and receives none")
            self._set(dict.fromkeys(self.own, self.initial(ParameterValue())), 0)
        if task.undo and not self.updated:
            if self.model.iteration != task.begin + 1:
                raise Violation(f"{self} is to undo its way back to {task.begin}")
            values = {n: self.model.values[n].undone(self._last[n], True) for n in self.own}
            self._set(values, task.begin)
            self.updated, self._last = True, {}
            self.core.status.iteration = task.begin

    # --------------------------------------------------------------------------------------- transfers

    def join(self, round: Round) -> Ticks[str | None]:  # type: ignore[override]  # its driver takes ticks
        """Become equal to the other pipelines."""
        self._next_transfer, self._aside = 0, {}
        if round.plan.transfers:
            self.world.provoke_fault(0.3, (1, 2, 3, 5, 8, 12))
        yield from self.stay(Mode.TRANSFER, self._transfer)
        return self._outcome()

    def _transfer(self, state: State) -> bool:
        """The next transfer in which it takes part. What comes is aside until all of it is there."""
        if (transfer := self._due_transfer()) is None:
            self._becomes_equal()
            return True
        number = self._next_transfer
        arrived = self._told.arrived.setdefault(number, set())
        if self.rank not in arrived:
            arrived.add(self.rank)
            return True
        if self._is_failing():
            self.world.seen["transfer broken"] += 1
            self.fail_communication()
            return True
        if arrived != {*transfer.ranks}:
            return False
        if self.rank == transfer.source:
            assert self.plan is not None
            if self.model.iteration != self.plan.resume:
                raise Violation(f"{self} gives layers of {self.model}, and all resume at {self.plan.resume}")
            self._told.sent[number] = self.model
        elif number not in self._told.sent:
            return False
        else:
            self._aside |= {layer: self._told.sent[number].values[layer] for layer in transfer.layers}
        self._next_transfer += 1
        return True

    def _is_failing(self) -> bool:
        assert self.active_generation is not None
        group = self.world.group(self.active_generation)
        return group.broken or bool(group.gone) or self.generation_over(self.view)

    def _becomes_equal(self) -> None:
        """All layers here are what they are elsewhere, and of the iteration with which all go on."""
        assert self.plan is not None
        if self._aside:
            self._set(self._aside, self.plan.resume)
            self._last = {}
            self.core.status.iteration = self.plan.resume
        self.updated, self.mode = False, Mode.EQUAL
        if self.model.iteration != self.plan.resume:
            raise Violation(f"{self} goes live in a generation that resumes at {self.plan.resume}")
        for layer in self.own:
            value = self.model.values[layer]
            if [iteration for iteration, _ in value.applied] != [*range(self.model.iteration)]:
                raise Violation(f"{self} goes live with {value} of layer {layer}")
            if self._told.live.setdefault(layer, value) != value:
                raise Violation(f"{self} goes live with another layer {layer} than its replica")

    # -------------------------------------------------------------------------------------- one step

    def _run(self, state: State) -> bool:
        match self.substep:
            case 0:
                self._told.begun.setdefault(self.model.iteration, set()).add(self.rank)
                self.averages, self.substep = None, 1
            case 1:
                return self._compute()
            case 2:
                return self._average()
            case 3:
                return self._wait_for_all()
            case 4:
                return self._clip()
            case 5:
                self._apply_averages(self._clipped)
                self.substep = 6
            case _:
                self._set({}, self.model.iteration + 1)
                self._step_done = True
        return True

    def _compute(self) -> bool:
        """With all stages of its pipeline; then it sends what its microbatches add up to."""
        iteration, told = self.model.iteration, self._told
        if self._is_failing() and self.world.rng.random() < 0.7:
            self.fail_communication()
            return True
        if not {*range(self.pipeline, self.pipeline + self._stages)} <= told.begun[iteration]:
            return self._waits_in_vain()
        for layer in self.own:
            added = iteration, hash((self.model.values[layer], self.history))
            told.sums.setdefault((iteration, layer), {})[self.rank] = added
        self.substep = 2
        return True

    def _average(self) -> bool:
        iteration = self.model.iteration
        sums = {layer: self._told.sums[iteration, layer] for layer in self.own}
        if any(len(of_layer) < self._pipelines for of_layer in sums.values()):
            return self._waits_in_vain()
        if self._is_failing() and self.world.rng.random() < 0.5:
            self.fail_communication()
            return True
        if any(len({*of_layer.values()}) > 1 for of_layer in sums.values()):
            raise Violation(f"{self} averages gradients of different states: {sums}")
        self.averages = iteration, {layer: of_layer[self.rank] for layer, of_layer in sums.items()}
        self._told.averaged.setdefault(iteration, set()).add(self.rank)
        self.substep = 3
        self.world.provoke_fault(0.1, (1, 1, 2, 3))
        return True

    def _wait_for_all(self) -> bool:
        if len(self._told.averaged[self.model.iteration]) < self.size:
            return self._waits_in_vain()
        if self._is_failing() and self.world.rng.random() < 0.5:
            self.world.seen["did not learn that all have their averages"] += 1
            self.fail_communication()
            return True
        assert self.averages is not None
        self._clipped, self.averages = self.averages[1], None
        self.substep = 4 if self._job.clips else 5
        self.world.provoke_fault(0.1, (1, 1, 2, 3))
        return True

    def _clip(self) -> bool:
        """The script takes the norm of all gradients of its pipeline, when averages are no longer kept."""
        clipped = self._told.clipped.setdefault(self.model.iteration, set())
        clipped.add(self.rank)
        if not {*range(self.pipeline, self.pipeline + self._stages)} <= clipped:
            return self._waits_in_vain()
        if self._is_failing() and self.world.rng.random() < 0.5:
            self.fail_communication()
            return True
        self.substep = 5
        return True

    def _waits_in_vain(self) -> bool:
        if self._is_failing():
            self.fail_communication()
            return True
        return False

    def _apply_averages(self, averages: dict[int, tuple[int, int]]) -> None:
        values = {layer: self.model.values[layer].updated(average) for layer, average in averages.items()}
        self._last = averages
        self._set(values, self.model.iteration)

    def break_half_updated(self) -> bool:
        """No communication follows the optimizer's step here."""
        return False
