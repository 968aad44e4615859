"""One worker's stages, protected by logging: live, replayed, or resending from the log (paper §5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from swift_ft.config.worker_context import WorkerContext
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError, first_line
from swift_ft.logging import LogReader, MessageKey
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import StageLayers, layers_of
from swift_ft.recovery.plan import Plan, Task
from swift_ft.runtime.pipeline.arrivals import Arrivals
from swift_ft.runtime.pipeline.log_interceptor import LogInterceptor, RetainedSends
from swift_ft.runtime.pipeline.published_shapes import PublishedShapes
from swift_ft.runtime.pipeline.replay_shards import ReplayShards, note_several_calls
from swift_ft.runtime.pipeline.script_communication import Absence, GroupUse, ScriptCommunication
from swift_ft.runtime.pipeline.script_partners import ScriptPartners
from swift_ft.runtime.pipeline.shared_layers import SharedLayers
from swift_ft.runtime.pipeline.shared_replay import Helping, SharedReplay
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.torch_adapters import lasting_group
from swift_ft.torch_adapters.comm_errors import hide_broken_schedules
from swift_ft.torch_adapters.layer_stack import LayerStack, stack_of_pipeline
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.layer_averages import LayerAverages
from swift_ft.torch_adapters.pipelining.resending import resend
from swift_ft.torch_adapters.pipelining.schedule_order import kind_of
from swift_ft.torch_adapters.pipelining.stage_metadata import Undo
from swift_ft.torch_adapters.pipelining.tied_parameters import Place, TiedParameters
from swift_ft.torch_adapters.process_group import GenerationGroup
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore


class LoggedPipeline:
    """A schedule whose messages are logged and can be read again.

    Args:
        schedule: any schedule of ``torch.distributed.pipelining``.
        context: the worker's place.
        recovery_groups: the group of each machine. Messages inside a group are not logged.
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
        replay_shards: what a replay of its stages can be divided into.
        shared_replay: its part in replays that several workers share.
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
        self._log = log
        self._interceptor = LogInterceptor(
            context.rank, context.workers_per_machine, recovery_groups, seed, log.messages
        )
        self._shapes = PublishedShapes(rendezvous)
        self._completed: int | None = None
        self._recorded: Mapping[int, dict[str, Any]] | None = None  # shapes of this worker's stages
        self._hook = PipelineHook(
            schedule,
            self._interceptor,
            self._publish_shapes,
            on_batch,
            on_several=partial(note_several_calls, rendezvous),
            in_step=in_step,
        )
        self.stack = stack_of_pipeline(self.modules, self.num_stages)
        if self.stack is not None:
            self.stack.on_layer(self._interceptor.on_layer)
            self._shapes.layout = self.stack.begun_cut
        self.shared_layers: SharedLayers | None = None
        if self.stack is not None and self.stack.pipelines > 1:
            self.shared_layers = SharedLayers(self.stack, self._hook, self._interceptor, group)
        self._sums: LayerAverages | None = None
        if self.stack is not None and self.stack.pipelines == 1 and self.stack.exact:
            counts = (self._hook.microbatches,)
            self._sums = LayerAverages(self.stack, self.stack.begun, counts, scale=self._hook.scales)
            self._hook.average(self._sums)
        self.tied = TiedParameters(self._hook, self._interceptor)
        self.tied_layers = TiedLayers(self.stack, self.tied) if self.stack is not None else None
        hook = self._hook
        group.follow(hook.handle, peers=lambda: hook.neighbours((context.rank,), hook.skipped_to))
        self._partners = partners
        self.script = ScriptCommunication(
            context.rank, self._group_of, log.messages, script_log_limit_bytes, self._announce
        )
        if context.started_in > 1:
            # It has not yet made the call that made them its partners (decision 29).
            self.script.remember(*partners.known())
        self.replay_shards = ReplayShards(
            context.config, helping, self._hook, self.stack, self.script, rendezvous
        )
        self.shared_replay = SharedReplay(
            helping, self._hook, self._interceptor, self.stack, self._shapes, log, group
        )
        if lasting_group.holds_thread(self._hook.device):
            group.waits.install()
        hide_broken_schedules()

    def put_back_after_trials(self, note: Callable[[], Undo]) -> None:
        """Have the changes of torch's trial run of the modules put back after it.

        Args:
            note: called before it, and what it returns after it.
        """
        self._hook.shapes.note = note

    def relaid(self, layout: StageLayers, of_all: StageLayers) -> None:
        """Layers were moved: the shapes of messages may be others, and what was sent is of no use.

        Args:
            layout: this pipeline's only.
            of_all: the same over all pipelines.
        """
        self._shapes.layout = layout
        if self.shared_layers is not None:
            self.shared_layers.place(of_all)
        if self._sums is not None:
            self._sums.place(of_all)
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
    def device(self) -> torch.device:
        """The device on which its stages compute."""
        return self._hook.device

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration."""
        return self._hook.microbatches

    def take_computed_s(self) -> float:
        """Seconds since the last call in which this worker's stages computed, and nothing was waited for."""
        return self._hook.take_computed_s()

    @property
    def kind(self) -> Schedule | None:
        """The kind of torch's schedule; None for a schedule of the user's own."""
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
    def shapes_known(self) -> bool:
        """Whether the shapes of all messages are known, so that no live warm-up is needed."""
        return self._hook.shapes.known or self._shapes.find(self.stages) is not None

    def begin(self, iteration: int, replica: int) -> None:
        """A step begins, on this replica of the pipeline."""
        self._interceptor.iteration, self._interceptor.replica = iteration, replica
        self._hook.begin()
        if self.shared_layers is not None:
            self.shared_layers.begin(iteration)
        if self._sums is not None:
            self._sums.begin(iteration)
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

    def aside(self, aside: bool) -> None:
        """Whether the schedule is called between two steps: nothing of that is logged or replayed."""
        self._hook.aside(aside)
        self._interceptor.computing = None

    def reset(self) -> None:
        """Discard an aborted step."""
        self._hook.reset()

    def end_replay(self) -> None:
        """The replay is complete, or it cannot continue."""
        self._interceptor.source, self._interceptor.replay_group = None, ()
        self._interceptor.expected = None
        self.shared_replay.end()
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
        if task.load is not None:
            self.shared_replay.loaded()
        if not self._hook.shapes.known:
            # No neighbour exchanges shapes with it: they are elsewhere (decision 66).
            self._hook.shapes.adopt(self._shapes.of_lost(self.stages))
        self._interceptor.replay_group = task.replay_group
        replayed = {self._context.rank, *task.replay_group}
        since = state.checkpoints.log_since
        # Only logs of survivors: members of the group send again what they had sent (decision 51).
        near = self._hook.neighbours(replayed, self.linked)
        offline = self._context.offline
        own = [self._context.rank] if offline is not None and offline.audit else []
        source = self._interceptor.source = self._log.read([*near, *own], since=since, iteration=task.begin)
        arrivals = Arrivals(source) if own else None
        self._interceptor.expected = arrivals.of_message if arrivals is not None else None

        def read(rank: int) -> LogReader:
            return source if rank in near else self._log.read([rank], since=since, iteration=task.begin)

        assert state.plan is not None
        live = {rank for rank, other in state.plan.tasks.items() if not other.replays} - replayed
        self.script.without(Absence(live, task.replay_until, read, near, replayed, arrivals))

    def _publish_shapes(self, shapes: Mapping[int, dict[str, Any]]) -> None:
        """Before the first message: a replacement of this worker must know the shapes."""
        self._shapes.publish(shapes)
        self._recorded = shapes
        self._on_shapes(shapes)

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
        # Those ahead take no more part in what the script communicates: logs have it (decision 29).
        if ahead and self._context.rank not in ahead:
            since = state.checkpoints.log_since

            def read(rank: int) -> LogReader:
                return self._log.read([rank], since=since, iteration=plan.resume)

            self.script.without(Absence(ahead, plan.resume + 1, read))
        if plan.warm_up:
            self._hook.shapes.forget()
        elif not self._hook.shapes.known and (shapes := self._shapes.find(self.stages)) is not None:
            self._hook.shapes.adopt(shapes)

    def resend_from_log(self, state: State, plan: Plan) -> str | None:
        """One iteration ahead of others: send this worker's messages of the interrupted one again.

        Returns:
            Why that was interrupted; None if it was not.
        """
        own = self._log.read([self._context.rank], since=state.checkpoints.log_since, iteration=plan.resume)

        def live(rank: int) -> bool:
            return not plan.tasks[rank].resend_from_log

        def sent(key: MessageKey, device: torch.device) -> torch.Tensor:
            # What stayed inside the recovery group is in no log (decision 25).
            kept = self._interceptor.retained_sends.get(key)
            return own.read(key).to(device) if kept is None else kept

        self._interceptor.iteration = plan.resume
        self._interceptor.expected = own.receipt
        try:
            resend(self._hook, self._interceptor, sent, live, self.tied.exchange(plan.resume))
        except RuntimeError as error:
            return first_line(error)
        finally:
            self._interceptor.expected = None
        return None


class TiedLayers:
    """Pairs of parameters of two layers each.

    Args:
        stack: has the layers of this worker.
        tied: sums the gradients, between the stages on which the layers are.
    """

    def __init__(self, stack: LayerStack, tied: TiedParameters) -> None:
        self._stack = stack
        self._tied = tied
        self._layout = stack.cut_of(stack.begun)
        self._pairs: list[tuple[str, str]] = []

    def tie(self, first: str, second: str) -> None:
        """Declare that two layers share a parameter: ``tie("0.token.weight", "9.logits.weight")``.

        Raises:
            UsageError: these are not parameters of two layers.
        """
        one, other = self._layer_of(first), self._layer_of(second)
        if one == other:
            raise UsageError(f"tie_layers() was given layer {one} twice: share the parameter itself there.")
        self._pairs.append((first, second) if one < other else (second, first))
        self.place(self._layout)

    def place(self, layout: StageLayers) -> None:
        """Find the stages on which the layers are, in a layout.

        Args:
            layout: the number of layers of each stage.
        """
        self._layout = layout
        if self._pairs:
            self._tied.tie_layers((self._place(first), self._place(second)) for first, second in self._pairs)

    def _place(self, name: str) -> Place:
        layer = _number(name)
        stage = next(s for s in range(len(self._layout)) if layer in layers_of(self._layout, s))
        return partial(self._stack.get_parameter, name), stage

    def _layer_of(self, name: str) -> int:
        number, _, rest = name.partition(".")
        if not (number.isdigit() and int(number) < self._stack.count and rest):
            raise UsageError(
                f"tie_layers() was given {name!r}: it takes the number of a layer, 0 to "
                f"{self._stack.count - 1}, and the name of a parameter in it, as in '0.token.weight'."
            )
        here = int(number) in self._stack.layers
        if here and not _has_parameter(self._stack.layer(int(number)), rest):
            raise UsageError(f"tie_layers() was given {name!r}: layer {number} has no parameter {rest!r}.")
        return int(number)


def _has_parameter(layer: nn.Module, name: str) -> bool:
    """Whether a layer has a parameter of this name, within wrappers as well: a compiled layer has it, too."""
    try:
        layer.get_parameter(name)
    except AttributeError:
        return False
    return True


def _number(name: str) -> int:
    return int(name.partition(".")[0])
