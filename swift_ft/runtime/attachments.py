"""The attachments of a session: a pipeline, replicas, functions between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift_ft.checkpoint.completeness import Completeness
from swift_ft.checkpoint.stages import StagesHere
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.checkpoint.worker_record import WorkerRecord
from swift_ft.config.extensions import Extensions, load
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.errors import UnsupportedError, UsageError
from swift_ft.host.processor import processor_in_words
from swift_ft.recovery.layout.stage_layers import cuts_of
from swift_ft.recovery.topology import WHOLE_MODEL
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.hooks.between import Between, Hook
from swift_ft.runtime.measures.profiler import Profiler
from swift_ft.runtime.measures.worker_records import WorkerRecords
from swift_ft.runtime.pipeline.layer_copies import check_replicas
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.pipeline.noted_results import NotedResults
from swift_ft.runtime.pipeline.script_partners import ScriptPartners
from swift_ft.runtime.pipeline.shared_layers import SharedLayers
from swift_ft.runtime.pipeline.shared_replay import Helping
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.script.script_phases import ScriptPhase, ScriptPhases
from swift_ft.runtime.settings import Settings
from swift_ft.runtime.worker.order import ORDER
from swift_ft.runtime.worker.part import Part
from swift_ft.torch_adapters.fsdp import ShardedModels, is_sharded, place_of, replicas_of
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_adapters.pipelining.tied_parameters import TiedParameters
from swift_ft.torch_adapters.process_group import GenerationGroup
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_core.module_hooks import OwnHook


@dataclass(kw_only=True, eq=False)
class Attachments:
    """The models, pipelines and parts that a script has attached, each checked at that moment.

    `assembly` makes it.

    Attributes:
        context: the worker's place.
        settings: the session's.
        state: what is protected.
        rendezvous: the rendezvous store.
        writer: writes there while training goes on.
        group: of all workers, in this generation.
        log: the worker's log of messages.
        records: of the worker, in the store.
        batches: compares what workers are given.
        between: what the script does between two steps.
        phases: where the script is.
        completeness: what has to be protected, once it is attached.
        sharded: what ``fully_shard`` has sharded.
        replicas: of the worker's model.
        profiler: measures the worker's iterations.
        pipeline: attached; None without one.
        setup: what the script communicated before its first step.
        parts: of the script's own, and of installed packages.
    """

    context: WorkerContext
    settings: Settings
    state: TrainingState
    rendezvous: RendezvousStore
    writer: BackgroundWriter
    group: GenerationGroup
    log: WorkerLog
    records: WorkerRecords
    batches: BatchCheck
    between: Between
    phases: ScriptPhases
    completeness: Completeness
    sharded: ShardedModels
    replicas: Replicas
    profiler: Profiler
    pipeline: LoggedPipeline | None = None
    setup: dict[str, str] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    def attach_pipeline(self, schedule: Any, helping: Helping) -> None:
        """See :meth:`swift_ft.Session.attach_pipeline`."""
        if self.replicas.sharded:
            raise UsageError("Attach the pipeline first, and then the FSDP model of its stage.")
        self.pipeline = LoggedPipeline(
            schedule,
            context=self.context,
            recovery_groups=self._logged_groups(),
            seed=self.settings.seed,
            log=self.log,
            rendezvous=self.rendezvous,
            group=self.group,
            helping=helping,
            partners=ScriptPartners(
                self.rendezvous,
                self.writer,
                self.context.rank,
                self.context.world_size,
                self._lost_with,
                lambda: self.replicas.attached,
            ),
            script_log_limit_bytes=self.settings.script_log_limit_bytes,
            on_batch=self.batches.given,
            on_shapes=self._write_record,
            in_step=lambda: self.phases.phase == ScriptPhase.STEP,
        )
        script = self.pipeline.script
        # Logged as well, for a replay without the job (decision 65).
        self.between.log = NotedResults(self.context.rank, self.log.messages, lambda: script.absence)
        self._check_layers()
        if self.pipeline.stack is None:  # whose layers have numbers of their own
            self.state.stages = StagesHere((*sorted(self.pipeline.modules),), self.pipeline.num_stages)
        for index, module in self.pipeline.modules.items():
            self.completeness.attach(f"stage {index}", module)
        self.profiler.attach_stages(self.pipeline.modules)

    def _logged_groups(self) -> Sequence[int]:
        """The recovery group of each machine: one for all where nothing is replayed, so nothing is logged."""
        groups = self.settings.recovery_groups
        stacks = (module for module in self.state.modules.values() if isinstance(module, LayerStack))
        # Such pipelines get a lost layer from each other (decision 17).
        return [0] * len(groups) if any(stack.pipelines > 1 for stack in stacks) else groups

    def _check_layers(self) -> None:
        """Refuse, before the first step, a use of LayerStack that is not supported.

        Raises:
            UnsupportedError: replicas beside the stack's own pipelines, or shards of its stages.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        if pipeline.stack is None:
            return
        if pipeline.stack.workers < self.context.world_size:
            raise UnsupportedError(
                "A LayerStack has all workers: for replicas say LayerStack(..., pipelines=2), without DDP. "
                "Shards of its stages need stages whose layers stay where they are."
            )
        of_ddp = any(isinstance(m, DistributedDataParallel) for m in pipeline.stack.modules())
        if self.shards or of_ddp:
            how = "wrapped by DDP" if of_ddp else "sharded"
            raise UnsupportedError(
                f"A layer of the LayerStack is {how}, so it belongs to workers, "
                "and layers move: leave that out of build_layer. Replicas are LayerStack(..., "
                "pipelines=2); shards need stages of the script's own."
            )
        counts, number = pipeline.stack.planned_counts, pipeline.stack.pipeline
        if counts and counts[number] != pipeline.microbatches:
            raise UsageError(
                f"The plan gives {counts[number]} microbatches to pipeline {number}, and its "
                f"schedule has {pipeline.microbatches}: give model.microbatches to the schedule."
            )
        if pipeline.shared_layers is not None:
            check_replicas(pipeline.stack, self.context.workers_per_machine)

    def _lost_with(self, rank: int) -> list[int]:
        groups, per_machine = self.settings.recovery_groups, self.context.workers_per_machine
        every = range(self.context.world_size)
        return [other for other in every if groups[other // per_machine] == groups[rank // per_machine]]

    def _write_record(self, shapes: Mapping[int, dict[str, Any]]) -> None:
        """Before the first message: a replay without the job must know the pipeline."""
        self.records.write(self.record(shapes))

    def record(self, shapes: Mapping[int, dict[str, Any]]) -> WorkerRecord:
        """The facts of this worker that a replay without the job needs.

        Args:
            shapes: of its pipeline's messages, by stage.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        return WorkerRecord(
            stages=pipeline.stages,
            holds=self.holds,
            pipeline=pipeline.pipeline,
            group=self.settings.recovery_groups[self.context.slot],
            linked=pipeline.linked,
            together=tuple(sorted(pipeline.script.together)),
            microbatches=pipeline.microbatches,
            shapes=shapes,
            setup=self.setup,
            processor=processor_in_words(pipeline.device),
        )

    def attach_ddp(self, model: Any) -> None:
        """See :meth:`swift_ft.Session.attach_ddp`."""
        self.completeness.attach("the DDP model", self.replicas.attach_ddp(model))
        self.replicas.model.register_forward_pre_hook(OwnHook(self._check_forward))
        if self.settings.check_data and self.pipeline is None:  # else the schedule is given the batches
            self.replicas.watch_inputs(self.batches.given)

    def attach_fsdp(self, model: Any) -> None:
        """See :meth:`swift_ft.Session.attach_fsdp`."""
        if not (isinstance(model, nn.Module) and is_sharded(model)):
            raise UnsupportedError(
                f"attach_fsdp() takes a model after torch.distributed.fsdp.fully_shard, not a {type(model)}."
            )
        # What follows looks at shards, and the script may have gathered parameters.
        self.sharded.begin()
        replicas, stages = replicas_of([model]), self.pipeline.modules.values() if self.pipeline else ()
        if any(stage is not model for stage in stages):
            raise UnsupportedError(
                "In a pipeline, attach_fsdp() takes the module of this worker's stage, and there must be no "
                "second one: leave it out, and the workers of a sharded stage replay together."
            )
        if len(replicas) == 1 and stages:
            raise UnsupportedError(
                "Each shard of the stage is on one worker only: leave attach_fsdp() out. The workers of the "
                "stage replay together. Shards within replicas (HSDP) would come from one another."
            )
        if len(replicas) == 1:
            raise UnsupportedError(
                "The model is sharded over all workers, so no other one holds what a lost one held: shard it "
                "within replicas (HSDP), as in fully_shard(model, mesh=init_device_mesh(device, (2, "
                'workers // 2), mesh_dim_names=("dp_replicate", "dp_shard"))). Or '
                "attach nothing, and Session(snapshot_every=...) keeps shards in another machine's memory."
            )
        self.replicas.attach_fsdp(model, replicas)
        self.completeness.attach("the FSDP model", model)
        if self.settings.check_data and self.pipeline is None:
            self.replicas.watch_inputs(self.batches.given)

    def add_hook(self, hook: Hook) -> None:
        """See :meth:`swift_ft.Session.between`."""
        self.keep_stop()
        self.between.add(hook)

    def keep_stop(self) -> None:
        """Make the training's end a part of the state, so that a replacement ends at the same iteration."""
        self.state.small.setdefault("swift_ft.stop", self.between.stop)

    def add_part(self, part: Part) -> None:
        """See :meth:`swift_ft.Session.attach_part`."""
        if not isinstance(part, Part):
            raise UsageError(
                f"session.attach_part() takes a subclass of swift_ft.extend.Part, made, not {part!r}."
            )
        # Parts are put in order by name.
        if not part.name or part.name in {*ORDER, *(known.name for known in self.parts)}:
            raise UsageError(
                f"{type(part).__name__}.name is {part.name!r}: give the part a name that no other part has "
                f"(swift_ft's are {', '.join(ORDER)})."
            )
        self.parts.append(part)

    def add_installed_parts(self) -> None:
        """Those that installed packages bring (``swift_ft.parts``).

        Raises:
            UsageError: one cannot be loaded, or is something else.
        """
        for part in load(Extensions.PARTS):
            if part is not None:
                self.add_part(part)

    def _check_forward(self, model: Any, _: Any) -> None:
        """DDP communicates by itself, where it keeps buffers equal."""
        if (
            not torch.compiler.is_compiling()
            and self.phases.phase == ScriptPhase.OUTSIDE
            and model.will_sync_module_buffers()
        ):
            self.phases.refuse("the DDP model, which synchronises its buffers,")

    @property
    def program(self) -> Mapping[str, str]:
        """The facts that all workers must share, besides the script's files and its session's settings."""
        stack = self.pipeline.stack if self.pipeline is not None else None
        if stack is None:
            return {}
        stages = "; ".join(", ".join(map(str, cut)) for cut in cuts_of(stack.begun, stack.stages_by_pipeline))
        return {"the layers of the LayerStack's stages": stages}

    def check_plan(self) -> None:
        """Refuse a plan that nobody follows, and pipelines whose gradients nobody averages.

        Raises:
            UsageError: the pipeline has no LayerStack, or there is none.
        """
        if self.layered is not None:
            return
        stacks = (module for module in self.state.modules.values() if isinstance(module, LayerStack))
        if any(stack.pipelines > 1 for stack in stacks):
            raise UsageError(
                "The pipelines of the LayerStack would each train a model of their own: give its stages to a "
                "schedule, and call session.attach_pipeline(schedule) before the first step.",
                alike=True,
            )
        if self.context.layer_plan is not None:
            raise UsageError(
                "swift-run --plan says which layers a stage has, and the script trains no LayerStack: leave "
                "it out, or make the model a swift_ft.LayerStack.",
                alike=True,
            )

    def check_counts(self, dealt: DealtBatches) -> None:
        """Refuse a next world of unlike numbers of microbatches, if nothing says that batches follow them.

        The samples of microbatches are compared in each step, too. For a next world that is too late: the one
        before is gone by then.

        Args:
            dealt: the script's global batches.

        Raises:
            UsageError: batches may give each pipeline an equal part.
        """
        stack = self.pipeline.stack if self.pipeline is not None else None
        if stack is None or len({*stack.planned_counts}) < 2 or stack.takes_counts or dealt.by_session:
            return
        raise UsageError(
            f"The plan gives the pipelines {', '.join(map(str, stack.planned_counts))} microbatches, and "
            "nothing says that batches follow: give swift_ft.data.GlobalBatches to Session(state), or ask "
            "for model.counts before the first step, and deal by it.",
            alike=True,
        )

    def topology(self, dealt: DealtBatches) -> dict[str, Any]:
        """The shape of the job, as far as checkpoints depend on it.

        Args:
            dealt: batches that any number of replicas can share.
        """
        context, pipeline = self.context, self.pipeline
        topology: dict[str, Any] = {
            "machines": context.world_size // context.workers_per_machine,
            "workers": context.workers_per_machine,
            "stages": pipeline.num_stages if pipeline is not None else 1,
        }
        # Layers are read from whichever parts have them, so their number matters and not the stages'.
        if pipeline is not None and pipeline.stack is not None:
            topology["layers"] = pipeline.stack.count
            topology |= {"pipelines": pipeline.stack.pipelines, "redealt": bool(dealt)}
        if self.shards:
            topology["sharded"] = True
        elif pipeline is None and self.replicas.attached:
            # Without batches that are dealt by sample, other replicas would get some samples twice.
            topology["redealt"] = bool(dealt)
        return topology

    @property
    def holds(self) -> tuple[str, ...]:
        """Names of the parts that are on this worker."""
        return held_by(self.pipeline, self.replicas, self.context.world_size, self.shards)

    @property
    def shards(self) -> str:
        """The place of this worker's shards, such as ``shard 1 of 2``; empty if nothing is sharded."""
        return place_of(self.state.modules.values())

    @property
    def tied(self) -> TiedParameters | None:
        """Parameters that this worker's stages share with others; None without a pipeline."""
        return self.pipeline.tied if self.pipeline is not None else None

    @property
    def script_is_logged(self) -> bool:
        """Whether what the script communicates by itself is logged."""
        return self.pipeline is not None and self.pipeline.script.logged

    @property
    def exact(self) -> bool:
        """Whether what is computed now is the original to the bit: not in every replay."""
        return self.pipeline is None or self.pipeline.shared_replay.exact

    @property
    def number(self) -> int:
        """Of this worker among those that have the same stages; each has other data."""
        return self.sharded.number or self.replicas.replica

    @property
    def layered(self) -> LoggedPipeline | None:
        """The pipeline, if its stages are those of a LayerStack."""
        return self.pipeline if self.pipeline is not None and self.pipeline.stack is not None else None

    @property
    def shared_layers(self) -> SharedLayers | None:
        """The sharing between a LayerStack's pipelines, which are replicas of each other; None elsewhere."""
        return self.pipeline.shared_layers if self.pipeline is not None else None

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this worker among its replicas, and how many there are with it."""
        stack = self.pipeline.stack if self.pipeline is not None else None
        if stack is not None and stack.pipelines > 1:
            return stack.pipeline, stack.pipelines
        return self.replicas.replica, self.replicas.count


def held_by(
    pipeline: LoggedPipeline | None, replicas: Replicas, world_size: int, shards: str
) -> tuple[str, ...]:
    """Names of the parts that are on a worker. Workers that hold the same are replicas.

    Several workers may have a stage and be no replicas: with tensor parallelism each has another part of it.

    Args:
        pipeline: the worker's stages, if it has any.
        replicas: the replicas of its model. With neither, no other worker is known to hold the same.
        world_size: number of workers.
        shards: which shards of its model the worker has, in words; empty if nothing is sharded.
    """
    if pipeline is None and not replicas.attached:
        return ()
    if pipeline is not None and pipeline.shared_layers is not None:
        assert pipeline.stack is not None
        last = pipeline.stack.stages_by_pipeline[0] - 1  # the first pipeline saves each layer
        return tuple(f"layers of stage {stage}" for stage in sorted({min(s, last) for s in pipeline.stages}))
    parts = WHOLE_MODEL if pipeline is None else tuple(f"stage {stage}" for stage in pipeline.stages)
    if replicas.sharded:
        return tuple(f"{part}, {shards}" for part in parts)
    # With tensor parallelism each holder of a stage has another part: replicas share gradients (decision 29).
    holders = world_size if pipeline is None else world_size // len({*pipeline.holders().values()})
    if replicas.count == holders:
        return parts
    return tuple(f"{part}'s part on worker {replicas.first}" for part in parts)
