"""One worker's stages, protected by logging: live, replayed, or resending from the log (paper §5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swift_ft.determinism import derive_seed, seed_torch
from swift_ft.errors import RecoveryError, UsageError, first_line
from swift_ft.failpoints import Point, hit
from swift_ft.logging import LogReader, MessageKey
from swift_ft.planning.layout.orders import Schedule
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import StageLayers, even_layout
from swift_ft.recovery.plan import Plan, Task
from swift_ft.runtime.helpers.member import GradientReduction, Helping, Member, own_random_state
from swift_ft.runtime.helpers.offload import offload
from swift_ft.runtime.helpers.shards import most_shards
from swift_ft.runtime.pipeline.log_interceptor import LogInterceptor, RetainedSends
from swift_ft.runtime.pipeline.script_communication import Absence, GroupUse, ScriptCommunication
from swift_ft.runtime.pipeline.script_partners import ScriptPartners
from swift_ft.runtime.pipeline.shared_layers import SharedLayers
from swift_ft.runtime.pipeline.tied_layers import TiedLayers
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.torch_adapters.comm_errors import hide_broken_schedules
from swift_ft.torch_adapters.fsdp import is_sharded
from swift_ft.torch_adapters.layer_stack import LayerStack, stack_of
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.microbatch import StageChain
from swift_ft.torch_adapters.pipelining.schedule_kind import kind_of
from swift_ft.torch_adapters.pipelining.tied_parameters import TiedParameters
from swift_ft.torch_adapters.process_group import GenerationGroup
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.worker_context import WorkerContext

__all__ = ["LoggedPipeline", "shapes_key"]

_SEVERAL = "pipeline/several-calls"
"""In the rendezvous store, from the first step on that calls its schedule more than once."""


def shapes_key(stage: int, layout: StageLayers = ()) -> str:
    """Where the rendezvous store has the shapes of a stage's messages, in a layout of its layers."""
    return f"stage/{stage}/{'-'.join(map(str, layout))}" if layout else f"stage/{stage}"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a member of a shared replay needs before it can begin.

    Attributes:
        source: reads the logs of the owners' neighbours.
        modules: built for the replay, by stage.
        shapes: of these stages' messages.
    """

    source: LogReader
    modules: Mapping[int, nn.Module]
    shapes: Mapping[int, dict[str, Any]]


class LoggedPipeline:
    """A schedule whose messages are logged and can be read again.

    Args:
        schedule: any schedule of ``torch.distributed.pipelining``.
        context: the worker's place.
        recovery_groups: the group of each machine. Messages inside a group are not logged.
        seed: of the run.
        log: where messages go.
        rendezvous: where the shapes of messages are published.
        group: makes the pipeline's process group again in each generation.
        helping: how survivors help in a replay.
        partners: publishes which workers replay together because of the script.
        script_log_limit_bytes: how much a group of the script may give to a worker in one iteration and still
            be logged.
        on_batch: called with what the script gives to the schedule.
        on_shapes: called once, before the first message, with the shapes of each stage's messages.
        in_step: whether the script is inside of a step.

    Attributes:
        stack: has the layers of its stages; None if the script divides its model itself.
        shared_layers: what it shares with pipelines that are its replicas by layer; None if there are none.
            Then no state is rebuilt from messages.
    """

    def __init__(
        self,
        schedule: Any,
        *,
        context: WorkerContext,
        recovery_groups: Sequence[int],
        seed: int,
        log: WorkerLog,
        rendezvous: RendezvousStore,
        group: GenerationGroup,
        helping: Helping,
        partners: ScriptPartners,
        script_log_limit_bytes: int,
        on_batch: Callable[[Any], None],
        on_shapes: Callable[[Mapping[int, dict[str, Any]]], None],
        in_step: Callable[[], bool],
    ) -> None:
        self._context = context
        self._on_shapes = on_shapes
        self._seed = seed
        self._helping = helping
        self._group = group
        self._log = log
        self._rendezvous = rendezvous
        self._interceptor = LogInterceptor(
            context.rank, context.workers_per_machine, recovery_groups, seed, log.messages
        )
        self._completed: int | None = None
        self._loaded = False
        self._recorded: Mapping[int, dict[str, Any]] | None = None  # shapes of this worker's stages
        self._inexact_until: int | None = None
        self._hook = PipelineHook(
            schedule,
            self._interceptor,
            self._publish_metadata,
            on_batch,
            on_several=lambda: rendezvous.set(_SEVERAL, "1"),
            in_step=in_step,
        )
        self.stack = self._stack_of_stages()
        if self.stack is not None:
            self.stack.on_layer(self._interceptor.on_layer)
        self._layout: StageLayers = ()
        self.shared_layers: SharedLayers | None = None
        if self.stack is not None and self.stack.pipelines > 1:
            self.shared_layers = SharedLayers(self.stack, self._hook, self._interceptor, group)
        self.tied = TiedParameters(self._hook, self._interceptor)
        self.tied_layers = TiedLayers(self.stack, self.tied) if self.stack is not None else None
        group.follow(self._hook.group, self._hook.renew)
        self._partners = partners
        self.script = ScriptCommunication(
            context.rank, self._group_of, log.messages, script_log_limit_bytes, self._announce
        )
        if context.started_in > 1:
            self.script.remember(*partners.known())
        if self._hook.device.type == "cpu":  # elsewhere the training thread's stream is what waits
            group.waits.install()
        hide_broken_schedules()

    def _stack_of_stages(self) -> LayerStack | None:
        """The stack that has the layers of all stages here; None if the script divides its model itself.

        Raises:
            UsageError: if the stages are not those of the stack.
        """
        stacks = {index: stack_of(module) for index, module in self.modules.items()}
        found = next((stack for stack in stacks.values() if stack is not None), None)
        if found is None:
            if any(
                isinstance(inner, LayerStack)
                for module in self.modules.values()
                for inner in module.modules()
            ):
                raise UsageError(
                    "The LayerStack is inside of another module, so its layers could not move: give it to "
                    "PipelineStage itself, and compile or wrap each layer in build_layer."
                )
            return None
        if any(stack is not found for stack in stacks.values()) or found.stages != self.stages:
            raise UsageError(
                "A LayerStack has all stages of its worker: PipelineStage(model, model.stage, "
                "model.num_stages, ...), or one for each of model.parts and model.stages."
            )
        if found.num_stages != self.num_stages:
            raise UsageError(f"The LayerStack is one of {found.num_stages} stages, not {self.num_stages}.")
        return found

    def relaid(self, layout: StageLayers, of_all: StageLayers) -> None:
        """Layers were moved: the shapes of messages may be others, and what was sent is of no use.

        Args:
            layout: of this pipeline.
            of_all: of all pipelines.
        """
        self._layout = layout
        if self.shared_layers is not None:
            self.shared_layers.place(of_all)
        if self.tied_layers is not None:
            self.tied_layers.place(layout)
        self._hook.shapes.forget()
        self._interceptor.retained_sends = RetainedSends()
        self._completed = None

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages on this worker."""
        return self._hook.stage_indices

    @property
    def modules(self) -> dict[int, nn.Module]:
        """The module of each stage on this worker."""
        return {stage.stage_index: stage.submod for stage in self._hook.stages}

    @property
    def pipeline(self) -> int:
        """Distinguishes this pipeline from its replicas."""
        return self._hook.pipeline

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration."""
        return self._hook.microbatches

    def take_computed_s(self) -> float:
        """Seconds since the last call in which this worker's stages computed, and nothing was waited for."""
        return self._hook.take_computed_s()

    @property
    def kind(self) -> Schedule | None:
        """Which schedule it is; None for one of the user's own."""
        return kind_of(self._hook.schedule)

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self._hook.num_stages

    def holders(self) -> dict[int, int]:
        """The rank of every stage of this pipeline."""
        return self._hook.holders()

    @property
    def linked(self) -> tuple[int, ...]:
        """Stages of other workers, besides the neighbouring ones, that exchange messages with this one's."""
        return tuple(sorted({*self.tied.stages, *self._hook.skipped_to}))

    @property
    def replaying(self) -> bool:
        """Whether the next step takes its messages from the log, or completes one that was interrupted."""
        completing = self.shared_layers is not None and self.shared_layers.completing
        return self._interceptor.source is not None or completing

    @property
    def joint(self) -> bool:
        """Whether other workers take part in the replay."""
        return bool(self._interceptor.replay_group) or self._hook.shared is not None

    @property
    def exact(self) -> bool:
        """Whether what is computed now is the original to the bit: not in an inexact replay."""
        return self._interceptor.inexact_from is None

    @property
    def shapes_known(self) -> bool:
        """Whether the shapes of all messages are known, so that no live warm-up is needed."""
        return self._hook.shapes.known or self._published(self.stages) is not None

    def begin(self, iteration: int, replica: int) -> None:
        """A step begins, on this replica of the pipeline."""
        self._interceptor.iteration, self._interceptor.replica = iteration, replica
        self._hook.begin()
        if self.shared_layers is not None:
            self.shared_layers.begin(iteration)
        self.tied.begin(iteration)
        self._interceptor.retained_sends.begin(iteration)
        self._interceptor.sent_bytes.clear()
        self._partners.publish(self.script.uses.values())
        self.script.begin_iteration(iteration)

    def completed(self) -> None:
        """The step that began last is complete."""
        self._completed = self._interceptor.iteration
        self._hook.completed()

    @property
    def sent(self) -> Mapping[int, int]:
        """Payload bytes to each other machine in the step that began last."""
        return {
            slot: size for slot, size in self._interceptor.sent_bytes.items() if slot != self._context.slot
        }

    def can_resend(self, iteration: int) -> bool:
        """Whether all that was sent in an iteration can be sent again."""
        return self._completed == iteration and self._interceptor.retained_sends.has_all_of(iteration)

    @property
    def why_no_helpers(self) -> str:
        """Why no survivor can help in a replay of this worker's stages; empty if they can."""
        if self._context.config.helpers == 0:
            return "swift-run was given --helpers 0"
        if self.shared_layers is not None:
            return "nothing is replayed: each layer has replicas"
        if self._helping.build is None and self.stack is None:
            return "attach_pipeline() was given no build"
        if any(is_sharded(module) for module in self.modules.values()):
            return "a stage is sharded by fully_shard"
        if self.script.together:
            return "the script communicates what only a replay of all members can repeat"
        if self._rendezvous.check([_SEVERAL]):
            return "the script calls its schedule several times in a step"
        return self._hook.why_not_apart()

    def needs_checkpoint(self, committed: int | None) -> bool:
        """Whether the log may have gaps until the next one, because an inexact replay logs nothing."""
        return self._inexact_until is not None and (committed or 0) < self._inexact_until

    @property
    def max_replay_shards(self) -> int:
        """Among how many workers a replay can be divided."""
        if self.why_no_helpers:
            return 1
        return most_shards(self._context.config, self._hook.microbatches, self._hook.device)

    def aside(self, aside: bool) -> None:
        """Whether the schedule is called between two steps: nothing of that is logged or replayed."""
        self._hook.aside(aside)
        self._interceptor.computing = None

    def reset(self) -> None:
        """Discard an aborted step."""
        self._hook.reset()

    def end_replay(self) -> None:
        """The replay is complete, or it cannot continue."""
        interceptor = self._interceptor
        interceptor.source, interceptor.replay_group, interceptor.inexact_from = None, (), None
        self._hook.shared = None
        if self.shared_layers is not None:
            self.shared_layers.completing = False
        self.script.without(None)

    def begin_replay(self, state: State, task: Task) -> None:
        """Take the messages of the next steps from the neighbours' logs.

        Raises:
            RecoveryError: if a log does not have what is needed.
        """
        if self.shared_layers is not None:
            self.shared_layers.completing = True
            return
        if not self._hook.shapes.known:
            self._hook.shapes.adopt(self._shapes(self.stages))
        self._interceptor.replay_group, self._loaded = task.replay_group, task.load is not None
        replayed = {self._context.rank, *task.replay_group}
        since = state.checkpoints.log_since
        near = self._near(replayed)
        source = self._interceptor.source = self._log.read(near, since=since, iteration=task.begin)

        def read(rank: int) -> LogReader:
            return source if rank in near else self._log.read([rank], since=since, iteration=task.begin)

        assert state.plan is not None
        live = {rank for rank, other in state.plan.tasks.items() if not other.replays} - replayed
        self.script.without(Absence(live, task.replay_until, read, near, present=replayed))

    def share(self, state: State, shared: ParallelReplay) -> None:
        """As an owner, take part in a parallel replay, whose group is formed, in the following steps.

        Raises:
            RecoveryError: if a log does not have what is needed.
            Exception: what the script's ``build`` raised.
        """
        member = self._member(shared, self._prepare(state, shared))
        self._hook.shared = member
        if self._helping.mode != GradientReduction.ORDERED:
            # The first iteration after the checkpoint begins with exact parameters.
            self._interceptor.inexact_from = shared.begin + self._loaded
            self._inexact_until = shared.until

    def _prepare(self, state: State, shared: ParallelReplay) -> _Prepared:
        """What a member needs, and no group for."""
        source = self._interceptor.source or self._log.read(
            self._near({*shared.owners}), since=state.checkpoints.log_since, iteration=shared.begin
        )
        here = self.stages if self._context.rank in shared.owners else ()
        wanted = [s for s, rank in self._hook.holders().items() if rank in shared.owners and s not in here]
        build = self._helping.build or self._build_stage
        with own_random_state():
            modules = {index: build(index).to(self._hook.device).train() for index in wanted}
        return _Prepared(source, modules, self._shapes(wanted))

    def _member(self, shared: ParallelReplay, prepared: _Prepared) -> Member:
        chain, group = self._chain(shared, prepared), self._group.helper_group
        assert group is not None
        return Member(
            shared,
            self._context.rank,
            group,
            chain,
            self._hook.holders(),
            self._hook.microbatches,
            prepared.source,
            self._helping.mode,
        )

    def prepare_help(
        self, state: State, shared: ParallelReplay, own: Iterable[torch.Tensor], until: ExitStack
    ) -> Callable[[], None]:
        """Prepare to compute for others, and offload this worker's own state, before a group is formed.

        The owners load at that time.

        Args:
            state: of the job.
            shared: the replay.
            own: all large state of this worker.
            until: closed when it is over, which brings that state back.

        Returns:
            What computes, once the group is formed. It raises what torch does, if a member is gone.

        Raises:
            Exception: as :meth:`share`; and what :func:`offload` raises.
        """
        helping = self._helping
        until.enter_context(own_random_state())
        until.enter_context(offload(own, memory_bytes=helping.memory_bytes, folder=helping.folder))
        prepared = self._prepare(state, shared)

        def help_owners() -> None:
            member = self._member(shared, prepared)
            for iteration in range(shared.begin, shared.until):
                hit(Point.HELP, iteration)
                member.step(iteration)

        return help_owners

    def _chain(self, shared: ParallelReplay, prepared: _Prepared) -> StageChain:
        """The stages of all owners: this worker's own, and others that are built for the replay."""
        hook = self._hook
        stages: dict[int, Any] = {
            s.stage_index: s for s in hook.stages if self._context.rank in shared.owners
        }
        for index, module in prepared.modules.items():
            stages[index] = hook.other_stage(module, index, prepared.shapes[index])

        def seed(iteration: int, stage: int, microbatch: int) -> None:
            self._interceptor.computing = iteration, microbatch
            seed_torch(derive_seed(self._seed, iteration, stage, microbatch, self._interceptor.replica))

        return StageChain(hook.schedule, stages, seed)

    def _build_stage(self, index: int) -> nn.Module:
        assert self.stack is not None
        layout = self._layout or even_layout(self.stack.count, self.num_stages)
        return self.stack.module_of(index, layout)

    def _near(self, ranks: Collection[int]) -> list[int]:
        """The workers next to some others, whose own logs are not read."""
        holders = self._hook.holders()
        near = {s + step for s, rank in holders.items() if rank in ranks for step in (-1, +1)}
        if self._context.rank in ranks:
            near |= {*self.linked}
        beside = {rank for stage, rank in holders.items() if stage in near}
        return sorted(beside - set(ranks))

    def _announce(self, use: GroupUse) -> None:
        """Before the first operation of the script with workers that must replay together with this one."""
        partners = {*self.script.together, *use.members} - {self._context.rank}
        self._partners.announce(partners, self.script.why or use.why, use)
        if self._recorded is not None:
            self._on_shapes(self._recorded)  # the record names them, too

    def _group_of(self, rank: int) -> int:
        """The recovery group of a worker."""
        return self._interceptor.recovery_groups[rank // self._context.workers_per_machine]

    def prepare(self, state: State, plan: Plan) -> None:
        """Before the group is formed: decide whether shapes are exchanged again, and who is ahead."""
        ahead = {rank for rank, task in plan.tasks.items() if task.resend_from_log}
        if ahead and self._context.rank not in ahead:
            since = state.checkpoints.log_since

            def read(rank: int) -> LogReader:
                return self._log.read([rank], since=since, iteration=plan.resume)

            self.script.without(Absence(ahead, plan.resume + 1, read))
        if plan.warm_up:
            self._hook.shapes.forget()
        elif not self._hook.shapes.known and (metadata := self._published(self.stages)) is not None:
            self._hook.shapes.adopt(metadata)

    def resend_from_log(self, state: State, plan: Plan) -> str | None:
        """One iteration ahead of others: send this worker's messages of the interrupted one again.

        Returns:
            Why that was interrupted; None if it was not.
        """
        own = self._log.read([self._context.rank], since=state.checkpoints.log_since, iteration=plan.resume)

        def live(rank: int) -> bool:
            return not plan.tasks[rank].resend_from_log

        def sent(key: MessageKey, device: torch.device) -> torch.Tensor:
            kept = self._interceptor.retained_sends.get(key)
            return own.read(key).to(device) if kept is None else kept

        self._interceptor.iteration = plan.resume
        self._interceptor.expected = own.receipt
        try:
            self._hook.serve(sent, live, self.tied.exchange(plan.resume))
        except RuntimeError as error:
            return first_line(error)
        finally:
            self._interceptor.expected = None
        return None

    # ----------------------------------------------------------------------------------------- shapes

    def _publish_metadata(self, metadata: dict[int, dict[str, Any]]) -> None:
        """Before the first message: a replacement of this worker must know the shapes."""
        for stage, shapes in metadata.items():
            self._rendezvous.set(shapes_key(stage, self._layout), json.dumps(shapes))
        self._recorded = metadata
        self._on_shapes(metadata)

    def _shapes(self, stages: Iterable[int]) -> dict[int, dict[str, Any]]:
        if (published := self._published(stages)) is None:
            raise RecoveryError("the shapes of the lost stages' messages were never published")
        return published

    def _published(self, stages: Iterable[int]) -> dict[int, dict[str, Any]] | None:
        keys = {stage: shapes_key(stage, self._layout) for stage in stages}
        if not self._rendezvous.check(list(keys.values())):
            return None
        return {stage: json.loads(self._rendezvous.get(key)) for stage, key in keys.items()}
