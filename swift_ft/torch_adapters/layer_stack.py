"""A model as a stack of layers, of which each worker has those of its pipeline stages.

    model = LayerStack(build_layer, count=10)
    stage = PipelineStage(model, model.stage, model.num_stages, device, group=model.group)

Layers keep their number in the whole model, in all names, too: ``7.attention.weight``. So names, values and
random numbers do not depend on which worker has a layer, and layers can move.
"""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from swift_ft.config.run_plan import RunPlan, plan_from_json, read_plan
from swift_ft.config.worker_context import WorkerContext
from swift_ft.determinism import derive_seed, random_state, seed_torch, set_random_state
from swift_ft.errors import NotLaunchedError, UsageError
from swift_ft.recovery.layout.stage_layers import StageLayers, cuts_of, layers_of
from swift_ft.torch_adapters.first_cut import Costs, first_cuts

_SEEDS = (1 << 63) - 1
"""Torch has unsigned seeds, and ours are signed."""


_asked_for_counts: weakref.WeakSet[LayerStack] = weakref.WeakSet()
"""No attribute says it: one that changes in a step would be a variable of the script."""


class LayerStack(nn.Module):
    """The layers of this worker, out of those of the whole model.

    Its output is the last layer's. A layer that returns a tuple gives several arguments to the next one.

    Args:
        build_layer: makes a layer, by its number. All that a layer is, it makes: dtype, frozen parameters,
            compilation. Random initial values may come from torch's generator, which is seeded for each
            layer from the seed that the script has set.
        count: layers of the whole model.
        stages_per_worker: for schedules with several stages per worker, whose modules are in :attr:`parts`.
        v_shaped: worker 0 has the first and the last stage (ZBVZeroBubble, DualPipeV), and not the first and
            the one after the last worker's (Interleaved1F1B).
        group: of the pipeline; by default all workers.
        pipelines: that are replicas of each other. The workers are dealt to them in the order of their ranks.
            They may get different cuts, and each layer's gradients are averaged over all of them.
        tolerate: machines that may be lost at once, wherever they are, without anything to be replayed: there
            is one pipeline more, unless ``pipelines`` says that there are still more.
        exact: add gradients up by a tree over the microbatches of all pipelines, so that the bits do not
            depend on how many each pipeline has. Without it, each pipeline adds up its own as torch does.
        plan: a file of ``swift-plan instantiate --json`` or ``swift-plan devices --json``: the pipelines,
            their workers, and the layers of each stage. Or give it to the run: ``swift-run --plan``.
        costs: of each layer, in any unit, or a ``layers.json``, or :func:`measured_costs`: the slowest stage
            is as fast as can be from the first iteration on. Where sizes were measured, too, no stage begins
            with more than its machine has memory for, if that can be and no group is given. Without it and
            without a plan, stages have equally many layers.
        min_stages: that a pipeline needs to hold the model. When machines are lost and none come, no pipeline
            gets shorter (``swift-run --on-loss shrink``).

    Attributes:
        count: layers of the whole model.
        stages: the indices of this worker's stages.
        num_stages: all stages of the pipeline.
        group: of the pipeline; None for the default group.
        pipelines: how many there are.
        tolerate: machines that may be lost at once.
        exact: gradients are added up by a tree.
        pipeline: the number of this worker's, from 0. It has this part of the global batch.
        stages_by_pipeline: how many each pipeline has.
        begun: the layers of each stage as the run begins, of all pipelines one after the other.
        min_stages: that a pipeline needs.
        takes_microbatches: the script has asked for :attr:`microbatches`, so another world may give others.
        planned_counts: as :attr:`counts`, for a session.

    Raises:
        UsageError: before ``init_process_group``, if there are fewer layers than stages, if the workers
            cannot form the pipelines, or if a plan or costs are not for this model and these workers.
    """

    def __init__(
        self,
        build_layer: Callable[[int], nn.Module],
        count: int,
        *,
        stages_per_worker: int = 1,
        v_shaped: bool = False,
        group: dist.ProcessGroup | None = None,
        pipelines: int | None = None,
        tolerate: int = 0,
        exact: bool = False,
        plan: str | os.PathLike[str] | None = None,
        costs: Costs | None = None,
        min_stages: int = 1,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise UsageError("Call dist.init_process_group(backend) before the LayerStack is made.")
        planned, changed = _plan(plan, costs)
        by_memory = group is None  # of replicas in groups of their own, each would know its own machines only
        if planned is not None:
            planned.check_model(count, stages_per_worker)
        if changed:  # what the script says is for the world with which the run began
            pipelines, tolerate = None, 0
        self.pipelines, self.tolerate = _pipelines(pipelines, tolerate, group, planned), tolerate
        self.min_stages, self.takes_microbatches = min_stages, False
        self.pipeline, self.exact = 0, exact
        self._ranks = _ranks_of(self.pipelines, group, planned)
        if self.pipelines > 1:
            self.pipeline, group = _form_pipelines(self._ranks)
        self.planned_counts: tuple[int, ...] = planned.microbatches if planned is not None else ()
        rank, workers = dist.get_rank(group), dist.get_world_size(group)
        self._build, self.count, self.group = build_layer, count, group
        self._turns, self._v_shaped = stages_per_worker, v_shaped
        self.stages_by_pipeline = tuple(len(ranks) * stages_per_worker for ranks in self._ranks)
        self._base_seed = torch.initial_seed() & _SEEDS
        self._begin_layer: Callable[[int], None] | None = None
        self._prepared: dict[int, nn.Module] = {}
        self.num_stages = workers * stages_per_worker
        if count < (most := max(self.stages_by_pipeline)):
            raise UsageError(f"A LayerStack of {count} layers has too few for {most} stages.")
        if (fewest := min(self.stages_by_pipeline)) < min_stages:
            raise UsageError(
                f"A pipeline would have {fewest} stages, and the LayerStack needs min_stages={min_stages}: "
                "start more machines for each pipeline."
            )
        self.stages = tuple(_stage(rank, turn, workers, v_shaped) for turn in range(stages_per_worker))
        several = stages_per_worker > 1
        self._parts = tuple(StageModule(self) for _ in self.stages) if several else ()  # a tuple: no children
        self._as_asked = planned is not None or costs is not None
        cuts = first_cuts(planned, costs, count, self._workers_of_stages(), by_memory=by_memory)
        self.begun: StageLayers = tuple(chain(*cuts))
        self.arrange(self.cut_of(self.begun))

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStack:
        """A copy, such as an average of the model is, in the same group: groups cannot be copied."""
        memo[id(self.group)] = self.group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        own = {**vars(self), "_begin_layer": None}  # the copy is no stage of the pipeline
        vars(copied).update(copy.deepcopy(own, memo))
        return copied

    @property
    def stage(self) -> int:
        """The index of this worker's only stage."""
        if len(self.stages) != 1:
            raise UsageError("This worker has several stages: take model.stages and model.parts.")
        return self.stages[0]

    @property
    def workers(self) -> int:
        """Of all pipelines."""
        return sum(map(len, self._ranks))

    @property
    def microbatches(self) -> int:
        """Of this worker's pipeline in an iteration, if a plan says it; else 0."""
        self.takes_microbatches = True
        return self.planned_counts[self.pipeline] if self.planned_counts else 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches of each pipeline in an iteration, if a plan says them; else empty.

        A script that deals batches by it asks for it before the first step: then the pipelines of another
        world may have unlike numbers.
        """
        _asked_for_counts.add(self)
        return self.planned_counts

    @property
    def takes_counts(self) -> bool:
        """Whether the script has asked for :attr:`counts`."""
        return self in _asked_for_counts

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The module of each stage, in the order of :attr:`stages`: the stack itself if it is only one."""
        return self._parts or (self,)

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that are here, ascending."""
        return tuple(sorted(int(name) for name, _ in self.named_children()))

    def layer(self, number: int) -> nn.Module:
        """A layer that is here."""
        return self.get_submodule(str(number))

    def layers_in(self, layout: StageLayers) -> tuple[int, ...]:
        """The numbers of the layers that a layout puts here, ascending."""
        return tuple(sorted(number for stage in self.stages for number in layers_of(layout, stage)))

    def cut_of(self, layout: StageLayers) -> StageLayers:
        """The layers of each stage of this worker's pipeline.

        Args:
            layout: over all pipelines.
        """
        return cuts_of(layout, self.stages_by_pipeline)[self.pipeline]

    def _workers_of_stages(self) -> list[list[int]]:
        """Of each pipeline, the rank of each stage's worker."""
        found = []
        for ranks in self._ranks:
            places = [(place, turn) for place in range(len(ranks)) for turn in range(self._turns)]
            stages = {_stage(place, turn, len(ranks), self._v_shaped): ranks[place] for place, turn in places}
            found.append([stages[stage] for stage in range(len(stages))])
        return found

    @property
    def same_stage(self) -> tuple[int, ...]:
        """The ranks of this worker and of those with its stage, in pipelines that have as many stages."""
        own = self._ranks[self.pipeline]
        place = own.index(dist.get_rank())
        return tuple(ranks[place] for ranks in self._ranks if len(ranks) == len(own))

    @property
    def begun_cut(self) -> StageLayers:
        """The layers of each stage of this pipeline in the beginning; empty if nobody has said anything."""
        return self.cut_of(self.begun) if self._as_asked else ()

    def holders(self, layout: StageLayers) -> dict[int, tuple[int, ...]]:
        """By layer, the rank that has it in each pipeline.

        Args:
            layout: over all pipelines.
        """
        found: dict[int, list[int]] = {number: [] for number in range(self.count)}
        cuts = cuts_of(layout, self.stages_by_pipeline)
        for cut, workers in zip(cuts, self._workers_of_stages(), strict=True):
            for stage, rank in enumerate(workers):
                for number in layers_of(cut, stage):
                    found[number].append(rank)
        return {number: tuple(ranks) for number, ranks in found.items()}

    def prepare(self, layout: StageLayers) -> Mapping[int, nn.Module]:
        """Build the layers that a layout puts here and that are not here yet, for :meth:`arrange`.

        Args:
            layout: the number of layers of each stage.
        """
        like = next(self.parameters(), None)
        missing = {*self.layers_in(layout)} - {*self.layers}
        self._prepared = {number: self._built(number, like) for number in sorted(missing)}
        return self._prepared

    def forget_prepared(self) -> None:
        """The layers that were prepared are not needed after all."""
        self._prepared = {}

    def arrange(self, layout: StageLayers) -> None:
        """Drop the layers that a layout does not put here, and take or build those that are missing.

        Args:
            layout: the number of layers of each stage.
        """
        wanted = self.layers_in(layout)
        if not {*wanted} <= {*self.layers, *self._prepared}:
            self.prepare(layout)
        layers = {**self._prepared, **{number: self.layer(number) for number in self.layers}}
        _put(self, {number: layers[number] for number in wanted})
        self.forget_prepared()
        for stage, part in zip(self.stages, self._parts, strict=False):
            _put(part, {number: self.layer(number) for number in layers_of(layout, stage)})

    def module_of(self, stage: int, layout: StageLayers) -> nn.Module:
        """Any stage's module, newly built: for a worker that computes for another one."""
        module = StageModule(self)
        _put(module, {number: self._built(number, None) for number in layers_of(layout, stage)})
        return module

    def _built(self, number: int, like: nn.Parameter | None) -> nn.Module:
        before = random_state()
        seed_torch(derive_seed(self._base_seed, number))
        try:
            layer = self._build(number)
        finally:
            set_random_state(before)
        if like is not None and like.device.type != "cpu":
            layer = layer.to(like.device)
        return layer.train(self.training)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all workers' layers down to a global norm, in each step.

        The result does not depend on which worker has a layer: norms are added up layer by layer.

        Args:
            max_norm: the largest 2-norm of all gradients together.

        Returns:
            The norm before, of shape ``()`` and dtype float32.
        """
        first = next(self.parameters())
        norms = torch.zeros(self.count, device=first.device)
        gradients = []
        for number in self.layers:
            own = [p.grad for p in self.layer(number).parameters() if p.grad is not None]
            if own:
                norms[number] = torch.nn.utils.get_total_norm(own)
            gradients += own
        dist.all_reduce(norms, group=self.group)  # each layer has one worker, and all others add a zero
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient.to(gradient.dtype))
        return total

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: bits may depend on which layers are compiled together, and layers move."""
        _refuse_compilation()

    def on_layer(self, begin: Callable[[int], None] | None) -> None:
        """Call a function with the number of each layer, before it computes."""
        self._begin_layer = begin

    def run(self, layers: Iterable[tuple[str, nn.Module]], args: tuple[Any, ...]) -> Any:
        """The output of layers, one after the other, by their numbers."""
        output: Any = args if len(args) != 1 else args[0]
        for number, layer in layers:
            if self._begin_layer is not None:
                self._begin_layer(int(number))
            output = layer(*output) if isinstance(output, tuple) else layer(output)
        return output

    def forward(self, *args: Any) -> Any:
        """The output of the last layer that is here."""
        if self._parts:
            raise UsageError("This worker has several stages: give model.parts to the PipelineStages.")
        return self.run(self.named_children(), args)


class StageModule(nn.Module):
    """The layers of one stage, by their numbers. Where a worker has several stages, its stack has them, too.

    Args:
        stack: says what happens before each layer.
    """

    def __init__(self, stack: LayerStack) -> None:
        super().__init__()
        self._stack = (stack,)  # a tuple: no child, since the stack has the layers, too

    @property
    def stack(self) -> LayerStack:
        """The stack."""
        return self._stack[0]

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse, as the stack does."""
        _refuse_compilation()

    def forward(self, *args: Any) -> Any:
        """The output of the last layer."""
        return self.stack.run(self.named_children(), args)


def _refuse_compilation() -> NoReturn:
    raise UsageError("Compile each layer of a LayerStack by itself: call compile() in build_layer.")


def _put(module: nn.Module, layers: Mapping[int, nn.Module]) -> None:
    """Let a module have these layers, in this order, and no others."""
    for name, _ in [*module.named_children()]:
        delattr(module, name)
    for number, layer in layers.items():
        module.add_module(str(number), layer)


def stack_of(module: nn.Module) -> LayerStack | None:
    """The stack whose layers a stage runs; None if its module is another one."""
    if isinstance(module, LayerStack):
        return module
    return module.stack if isinstance(module, StageModule) else None


def stack_of_pipeline(modules: Mapping[int, nn.Module], num_stages: int) -> LayerStack | None:
    """The stack whose layers all stages of a worker run; None if the script divides its model itself.

    Args:
        modules: of this worker's stages, by index, in their order.
        num_stages: all stages of the pipeline.

    Raises:
        UsageError: if the stages are not those of the stack.
    """
    stacks = [stack_of(module) for module in modules.values()]
    found = next((stack for stack in stacks if stack is not None), None)
    if found is None:
        if any(stack_of(inner) is not None for module in modules.values() for inner in module.modules()):
            raise UsageError(
                "The LayerStack is inside of another module, so its layers could not move: give it to "
                "PipelineStage itself, and compile or wrap each layer in build_layer."
            )
        return None
    if any(stack is not found for stack in stacks) or found.stages != tuple(modules):
        raise UsageError(
            "A LayerStack has all stages of its worker: PipelineStage(model, model.stage, "
            "model.num_stages, ...), or one for each of model.parts and model.stages."
        )
    if found.num_stages != num_stages:
        raise UsageError(f"The LayerStack is one of {found.num_stages} stages, not {num_stages}.")
    return found


def _plan(plan: str | os.PathLike[str] | None, costs: object) -> tuple[RunPlan | None, bool]:
    """The plan of the present world, of the run, or of the script, and whether a change has brought it."""
    of_run, per_machine, changed = None, 1, False
    with contextlib.suppress(NotLaunchedError):
        context = WorkerContext.from_env()
        of_run, per_machine = context.layer_plan, context.workers_per_machine
        changed = of_run is not None and of_run == context.plan
        if changed:  # it comes after what the script begins with
            plan, costs = None, None
    ways = {"swift-run --plan": of_run, "plan=": plan, "costs=": costs}
    if len(given := [name for name, value in ways.items() if value is not None]) > 1:
        raise UsageError(f"{' and '.join(given)} say which layers a stage has: give one of them.")
    if of_run is None and plan is None:
        return None, False
    found = plan_from_json(of_run) if of_run is not None else read_plan(Path(plan or ""))
    found.check_workers(dist.get_world_size() // per_machine, per_machine)
    return found, changed


def _pipelines(
    pipelines: int | None, tolerate: int, group: dist.ProcessGroup | None, plan: RunPlan | None
) -> int:
    wanted = tolerate + 1 if pipelines is None else pipelines
    if plan is not None:
        if pipelines not in (None, len(plan.pipelines)):
            raise UsageError(
                f"The plan has {len(plan.pipelines)} pipelines, and the LayerStack pipelines={pipelines}: "
                "leave pipelines= out, and the plan says it."
            )
        wanted = len(plan.pipelines)
    if tolerate < 0 or wanted < 1:
        raise UsageError(f"pipelines={pipelines} and tolerate={tolerate}: give one pipeline or more.")
    if wanted <= tolerate:
        raise UsageError(
            f"{wanted} pipelines have {wanted} copies of each layer, which {tolerate} losses at once may "
            f"take: give pipelines={tolerate + 1} or more, or leave it out."
        )
    if wanted > 1 and group is not None:
        raise UsageError("The LayerStack makes the groups of its pipelines itself: leave group= out.")
    if plan is None and (workers := dist.get_world_size()) % wanted:
        raise UsageError(
            f"{workers} workers cannot form {wanted} pipelines with as many stages each: start with a "
            f"multiple of {wanted}, or give a plan (swift-run --plan). A machine may be missing (--nnodes "
            "MIN:MAX): then another one runs its workers."
        )
    return wanted


def _ranks_of(
    pipelines: int, group: dist.ProcessGroup | None, plan: RunPlan | None
) -> tuple[tuple[int, ...], ...]:
    """The workers of each pipeline, in the order of its stages."""
    if plan is not None and group is None:
        return plan.ranks
    every = dist.get_process_group_ranks(group) if group is not None else [*range(dist.get_world_size())]
    size = len(every) // pipelines
    return tuple(tuple(every[number * size : (number + 1) * size]) for number in range(pipelines))


def _form_pipelines(ranks: Sequence[Sequence[int]]) -> tuple[int, dist.ProcessGroup]:
    """The number of this worker's pipeline, and its group. All workers make all groups."""
    groups = [dist.new_group([*of_pipeline]) for of_pipeline in ranks]
    own = next(number for number, of_pipeline in enumerate(ranks) if dist.get_rank() in of_pipeline)
    group: dist.ProcessGroup = groups[own]
    return own, group


def _stage(rank: int, turn: int, workers: int, v_shaped: bool) -> int:
    """The stage of a worker in one of its turns."""
    return workers * (turn + 1) - 1 - rank if v_shaped and turn % 2 else workers * turn + rank
