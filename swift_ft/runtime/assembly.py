"""Builds one worker's runtime: the only place that knows all its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from swift_ft.checkpoint.layered_state import LayeredState
from swift_ft.checkpoint.step.places import Place
from swift_ft.checkpoint.store_claim import check_next_world, claim_store, keep_topology, note_topology
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.agent_channel import tell_agent
from swift_ft.coordination.setup_communication import SetupCommunication
from swift_ft.costs.job import Worker
from swift_ft.costs.next_world import Pipelines
from swift_ft.errors import UsageError
from swift_ft.observe.spans import recorder
from swift_ft.recovery.devices import pace_of
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.recovery.policy import Limits, Price
from swift_ft.recovery.topology import is_whole_model
from swift_ft.runtime.checkpoints.part import CheckpointsPart, Elsewhere
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.data.digest import digest_of
from swift_ft.runtime.data.file_peers import share_files
from swift_ft.runtime.data.part import DataPart, check_remade
from swift_ft.runtime.device_part import Device
from swift_ft.runtime.elastic.layer_profiler import LayerCosts
from swift_ft.runtime.elastic.layer_sync import LayerSync
from swift_ft.runtime.elastic.repartition import Repartition
from swift_ft.runtime.elastic.requests_part import Requests, new_layer_costs, new_rebalance, new_reshare
from swift_ft.runtime.epoch_top import Epochs, EpochTop
from swift_ft.runtime.fault_injector import inject_faults
from swift_ft.runtime.foundations import Foundations
from swift_ft.runtime.hooks.module_changes import ModuleChanges
from swift_ft.runtime.hooks.part import HooksPart
from swift_ft.runtime.iterations import Iterations
from swift_ft.runtime.measures.part import MeasuresPart, OwnWork
from swift_ft.runtime.memory.part import MemoryPart
from swift_ft.runtime.metrics import SessionMetrics
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.pipeline.part import LogPart, PipelinePart
from swift_ft.runtime.pipeline.replay import Replays
from swift_ft.runtime.policy.forecasts import Forecasts, LayerForecasts, no_forecast, replica_forecast
from swift_ft.runtime.policy.part import Measures, PolicyPart
from swift_ft.runtime.program_check import check_program
from swift_ft.runtime.records import Records
from swift_ft.runtime.replicas.part import ReplicasPart
from swift_ft.runtime.replicas.state_sync import PreparedState, StateSync
from swift_ft.runtime.script.script_line import line_in
from swift_ft.runtime.settings import Settings
from swift_ft.runtime.slowness.part import SlownessPart
from swift_ft.runtime.slowness.straggler_watch import StragglerWatch
from swift_ft.runtime.start_values import StartValues
from swift_ft.runtime.state_part import LocalState
from swift_ft.runtime.steps import Loop
from swift_ft.runtime.verify.own_gradients_part import KeptSteps, OwnGradientsPart
from swift_ft.runtime.verify.part import VerifyPart
from swift_ft.runtime.verify.step_inputs import StepInputs
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.part import Part
from swift_ft.runtime.worker.parts import Parts
from swift_ft.runtime.worker.ports import NoLayers, NoReplays, Ports
from swift_ft.runtime.worlds.handover import Handover
from swift_ft.runtime.worlds.part import WorldsPart
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.comm_errors import interruption_of, is_broken_communication
from swift_ft.torch_adapters.ddp_construction import constructed
from swift_ft.torch_adapters.device_waits import DeviceWaits
from swift_ft.torch_adapters.distribution import communicate_again
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.script_groups import script_groups

if TYPE_CHECKING:
    from swift_ft.planning.forecast import Forecast


class Assembly(Foundations):
    """One worker's runtime: what it stands on, and the parts that follow from what the script attaches.

    Args:
        context: the worker's place.
        store: where logs and checkpoints go.
        state: what is protected.
        settings: the session's.
    """

    def __init__(
        self, context: WorkerContext, store: Store, state: TrainingState, settings: Settings
    ) -> None:
        # From the first step on. Before all else: the journal's thread, which starts below, looks at them.
        self._costs: LayerCosts | None = None
        self._slowness: SlownessPart | None = None
        self._policy: PolicyPart | None = None
        super().__init__(context, store, state, settings)

    # ------------------------------------------------------------------------------------------ ready

    def start(self, *, epochs: bool = False) -> Loop:
        """Become part of the job, once all is attached. Returns the script's loop.

        Args:
            epochs: it is one over epochs.
        """
        progress = Epochs()
        if epochs:
            self._state.small["swift_ft.epochs"] = progress
            self._rollback.carried.epoch_begins()
        recorder.lap("join the job")
        # The script's start is over. From here on a replacement communicates like any other worker.
        script_groups.complete()
        communicate_again()
        if constructed() > 1:
            raise UsageError(
                f"The script has {constructed()} DDP models, and a session protects one: put all of them "
                "into one module, and DDP around that (find_unused_parameters=True), as in a GAN "
                "(docs/guide.md#data-parallelism)."
            )
        if constructed() and not self._replicas.attached:
            raise UsageError(
                "The script has a DDP model that is not attached: its replicas could not be recovered. Call "
                "session.attach_ddp(model) before the first step.",
                alike=True,
            )
        self.attached.check_plan()
        self._state.check_values()
        self._end_setup()
        if self._context.offline is None:
            parts = {**self._state.modules, **self._state.optimizers, **self._state.small}
            facts = self.attached.program
            check_program(self._context, self._rendezvous, self._writer, self._settings, parts, facts)
        self._publish_place()  # first of all: another worker may wait for it, and all others for that one
        self._costs = new_layer_costs(self._context, self.attached.layered, self._rendezvous)
        self._iterations = iterations = self._new_iterations(progress)
        self._in_memory.start()
        self._claim()
        iterations.start()
        if self._context.rank == 0:
            # One worker judges, and the journal makes it everybody's judgement (decision 21).
            watch = StragglerWatch(
                self._participant, self._progress, self.profiler.workers, self._costs, self._dealt
            )
            watch.start(rebalances=self._requests is not None)
        top = EpochTop(self._state, self._rollback.carried, progress, self._settings.seed)
        return Loop(iterations, self.between, self.phases, top, Records(self._context))

    def _claim(self) -> None:
        """The store is this run's from now on. What comes after this worker's end is left to its agent."""
        noted = {
            "checkpoint_every": self._settings.checkpoint_every,
            "log_disk_bytes": self._settings.log.budget.disk_bytes,
        }
        topology, timeout_s = self.attached.topology(self._dealt), self._context.config.report_timeout_s
        found = claim_store(self._store, self._context, self._run_keys, topology, timeout_s, noted)
        self._commits.found(found)
        if self._context.world:
            check_next_world(self._run_keys, topology)
            self.attached.check_counts(self._dealt)
        else:
            self._first_live()
        tell_agent(store=self._store.child_url(""))
        check_remade(self._completeness, self._rendezvous, self._context.rank)
        recorder.lap()

    def _first_live(self) -> None:
        """Begin to archive. A worker of the next world leaves that to the present one until it trains."""
        if self._context.rank == 0:
            topology = self.attached.topology(self._dealt)
            note_topology(self._run_keys, topology)
            if self._context.world:
                # Nobody trains meanwhile, and a store may be slow.
                self._background.submit(keep_topology, self._store, self._context.run_id, topology)
        if self._archiver is not None:
            self._archiver.start()

    def _end_setup(self) -> None:
        """From now on, what the script communicates belongs to its steps."""
        setup = LastingGroup.interceptor
        if isinstance(setup, SetupCommunication):
            # Only now is it known that a session follows (decision 67).
            if (refused := setup.refused) is not None:
                raise UsageError(
                    f"{line_in(refused.stack)} calls {refused.operation} before the first step. A worker "
                    f"that replaces a lost one could not be given the result: {refused.reason}"
                )
            self.attached.setup = setup.noted
            for key, value in setup.noted.items():
                # Set before there was a journal: from now on another machine keeps them, too (decision 55).
                self._rendezvous.on_set(key, value)
        pipeline = self.attached.pipeline
        self.phases.steps = pipeline.script if pipeline is not None else None
        LastingGroup.interceptor = self.phases
        self.between.agree()

    def _new_iterations(self, epochs: Epochs) -> Iterations:
        pipeline = self.attached.pipeline
        layers = self._new_layers()
        replays = self._new_replays(pipeline) if pipeline is not None else NoReplays()
        if pipeline is not None and self.attached.shared_layers is None:
            carried, rank = self._rollback.carried, self._context.rank
            self.between.changes = ModuleChanges(
                rank,
                carried,
                self._rendezvous,
                self._writer,
                self._state.tree.modules,
                keep=(max(self._settings.keep_checkpoints, 2) + 1) * self._settings.checkpoint_every,
            )
        on_device = DeviceWaits(self._group.waits, self._devices)
        hooks, checkpoints = self._new_hooks(pipeline, on_device), self._new_checkpoints(layers)
        device = Device(on_device, self._is_connection_error)
        self.attached.add_installed_parts()
        parts: list[Part] = [hooks, checkpoints, device, *self._own_parts(pipeline, layers)]
        parts += self.attached.parts
        if layers is not None:
            parts.append(layers)
        if pipeline is not None:
            parts.append(self._pipeline_part(pipeline))
        if self._requests is not None:
            parts.append(self._requests)
        parts.append(WorldsPart(self._participant, self._context.rank, self._first_live))
        layout, copy_of = self._layout_of(layers), self._in_memory.copy_of
        handover = Handover(self._context, self._state, self._peers, layout, copy_of)
        every, act = self._settings.verify_every, self._settings.on_corruption
        uncopied = self._rollback.uncopied
        verify = VerifyPart(self._context.rank, self._state, self._participant, epochs, every, act, uncopied)
        parts.append(verify)
        own_gradients = self._new_own_gradients(lambda iteration: core.due(iteration))
        parts += [own_gradients] if own_gradients is not None else []
        ports = Ports(
            self._participant,
            self._groups,
            replays,
            layers or NoLayers(),
            checkpoints,
            hooks,
            handover,
            verify,
        )
        core = self._new_core(Parts(parts), ports)
        if self._context.config.inject:
            inject_faults(
                self._context,
                self.status,
                self._state.optimizers.values(),
                participant=self._participant,
                break_connections=self._groups.abort,
                replaying=lambda: replays.active,
                store=self._store,
            )
        return Iterations(core, self._groups, replays, device, self._batches, self._is_connection_error)

    def _new_core(self, parts: Parts, ports: Ports) -> WorkerCore:
        return WorkerCore(self._context.rank, self.status, parts, ports)

    def _new_own_gradients(self, due: Callable[[int], bool]) -> OwnGradientsPart | None:
        """Notes them where spares audit, and no messages are logged that they could replay.

        Args:
            due: whether a checkpoint has so many completed iterations.
        """
        if not self._context.config.audit or not is_whole_model(self.attached.holds):
            return None
        participant, records = self._participant, self._records
        kept = KeptSteps(
            participant, records.write_own_steps, lambda: records.write_setup(self.attached.setup)
        )
        inputs = StepInputs(self._state, self._rollback.carried, digest_of, all_known=False)
        return OwnGradientsPart(
            self._replicas,
            inputs,
            due,
            lambda: participant.state.checkpoints.epoch,
            kept.keep,
            training=True,
        )

    def _is_connection_error(self, error: BaseException) -> bool:
        """Whether an exception in the body of a step comes from broken communication."""
        return is_broken_communication(error, in_backward=self._replicas.broken)

    def _own_parts(self, pipeline: LoggedPipeline | None, layers: Repartition | None) -> Iterator[Part]:
        """Those that every worker has."""
        attached, context = self.attached, self._context
        files = share_files(self._state.small.values(), self._peers, self._rendezvous, context)
        yield DataPart(self._batches, self._dealt, files, self._participant)
        # Workers that may have different data have different random numbers.
        alike = pipeline is not None and not self._replicas.attached and not self._sharded
        start_values = StartValues(context, self._rollback.carried, self._run_keys, self._writer)
        yield LocalState(
            self.status,
            self._sharded,
            self._completeness,
            self._rollback,
            start_values,
            seed=self._settings.seed,
            data_of=None if alike else context.rank,
            first_life=context.started_in == 1,
        )
        yield ReplicasPart(
            self.status,
            self._replicas,
            self._rollback,
            self._new_sync(layers),
            lambda: attached.holds,
            pipelined=pipeline is not None,
            by_layer=attached.shared_layers is not None,
        )
        group = self._settings.recovery_groups[context.slot]
        # Asked at each report: the script may communicate for the first time in a later step.
        yield LogPart(self.log, group, lambda: self._replicas.attached or attached.script_is_logged)
        yield MemoryPart(self._in_memory, lambda: bool(attached.shards))
        own_work = OwnWork(pipeline, self._replicas, self._dealt)
        self._slowness = slowness = SlownessPart(
            context.rank,
            context.world_size,
            self._progress,
            machines=context.world_size // context.workers_per_machine,
        )
        yield MeasuresPart(
            self.status,
            self._participant,
            self.log,
            self._history,
            self.profiler,
            own_work,
            self._trace,
            self._progress,
            lambda: slowness.link,
            lambda: pipeline.sent if pipeline is not None else None,
            write_s=context.config.report_timeout_s,
        )
        yield slowness
        self._policy = self._new_policy(pipeline, own_work)
        if self._policy is not None:
            yield self._policy
        only_replicas = not (pipeline or layers or self._dealt)
        yield PreparedState(self.status, self._replicas, only_replicas=only_replicas)

    def _new_policy(self, pipeline: LoggedPipeline | None, own_work: OwnWork) -> PolicyPart | None:
        context, config = self._context, self._context.config
        only_returns = config.policy == "off"
        if context.rank or (only_returns and config.on_loss != "shrink"):
            return None
        forecasts: Forecasts = no_forecast
        layered = self.attached.layered
        if layered is not None and layered.stack is not None and self._costs is not None:
            stack, each = layered.stack, context.workers_per_machine
            stages = len(stack.stages)
            shape = Pipelines(layered.kind, layered.microbatches, stages, stack.pipelines, each)
            forecasts = LayerForecasts(self._costs.read, shape)
        elif pipeline is None and self._dealt:
            forecasts = replica_forecast
        price = None if config.policy_prices is None else Price(*config.policy_prices)
        limits = Limits(*config.policy_limits, price, only_returns=only_returns)
        layers = self._costs.read if self._costs is not None else lambda state: None
        measures = Measures(own_work.medians, self.profiler.workers, forecasts, layers)
        return PolicyPart(self._participant, limits, measures, chooses=config.policy != "advise")

    def _on_state(self, state: State) -> None:
        super()._on_state(state)
        if self._policy is not None:
            self._policy.on_change(state)

    def _pipeline_part(self, pipeline: LoggedPipeline) -> PipelinePart:
        return PipelinePart(
            pipeline,
            self.status,
            self.log,
            lambda: self.attached.number,
            self._rollback.note_variables,
            dealt=self._dealt.by_session,
            rank=self._context.rank,
        )

    def _new_hooks(self, pipeline: LoggedPipeline | None, on_device: DeviceWaits) -> HooksPart:
        return HooksPart(
            self.status,
            self.between,
            self.phases,
            self._progress,
            pipeline.aside if pipeline is not None else lambda _: None,
            lambda error: interruption_of(error, in_backward=self._replicas.broken),
            on_device,
        )

    def _new_checkpoints(self, layers: Repartition | None) -> CheckpointsPart:
        shared: Callable[[Place], bool] = layers.goes_with_layer if layers is not None else lambda _: False
        return CheckpointsPart(
            self._context,
            self.status,
            self._checkpointer,
            self._saver,
            self._part_peers,
            self._housekeeping,
            self._archiver,
            self._writer,
            self._progress,
            Elsewhere(
                copy=self._in_memory.load,
                layout=self._layout_of(layers),
                end_segment=self.log.roll,
                kept=partial(self._replicas.kept_variables, own_at=None, shared=shared),
                note_variables=self._replicas.note_variables,
                exact=lambda: self.attached.exact,
                saving=self._history.saving,
            ),
        )

    def _devices(self) -> set[torch.device]:
        return {parameter.device for parameter in self._state.named_parameters().values()}

    @cached_property
    def _dealt(self) -> DealtBatches:
        number, count = self.attached.replica
        dealt = DealtBatches(self._state.small.values(), self._batches, self.attached.shared_layers)
        dealt.deal(count, number, sharded=bool(self.attached.shards))
        return dealt

    @cached_property
    def _requests(self) -> Requests | None:
        """Asks for other layouts and shares; None where none are wanted."""
        context, pipeline, sharded = self._context, self.attached.pipeline, bool(self.attached.shards)
        rebalance = new_rebalance(context, self.attached.layered, self._costs)
        reshare = new_reshare(context, self._dealt, self._costs, pipeline, sharded=sharded)
        if rebalance is None and reshare is None:
            return None
        keep = self._records.write_layers
        return Requests(self._participant, context.rank, rebalance, reshare, self._costs, keep)

    @staticmethod
    def _layout_of(layers: Repartition | None) -> Callable[[State], StageLayers | None]:
        return layers.adopt if layers is not None else lambda _: None

    def _new_layers(self) -> Repartition | None:
        if self.attached.layered is None:
            return None
        return Repartition(
            self.attached.layered,
            LayeredState(self._state),
            self.status,
            self._participant,
            self._groups,
            self._progress,
            self._layers_moved,
        )

    def _new_sync(self, layers: Repartition | None) -> StateSync | LayerSync:
        rank, status, groups, progress = self._context.rank, self.status, self._groups, self._progress
        if layers is not None and self.attached.shared_layers is not None:
            self._replicas.same_stage = layers.same_stage
            if self._replicas.own_variables is not None:
                self._replicas.own_variables.buffers_of_layers = layers.saved_buffers
            kept = partial(self._replicas.kept_variables, shared=layers.goes_with_layer)
            return LayerSync(rank, status, self._state, layers, groups, progress, kept)
        return StateSync(rank, status, self._replicas, self._rollback, groups, progress)

    def _layers_moved(self) -> None:
        """Drop references to tensors that left this worker: they keep them alive, or bring them back."""
        self._rollback.forget()
        self._replicas.updates.forget()

    def _new_replays(self, pipeline: LoggedPipeline) -> Replays:
        return Replays(
            pipeline,
            self.status,
            self._replicas,
            self._participant,
            self._groups,
            self._progress,
            own=self._state.tensors,
            aside=self._rollback.aside,
        )

    # -------------------------------------------------------------------------------- what a session shows

    def metrics(self) -> SessionMetrics:
        """See :meth:`swift_ft.Session.metrics`. May be called from any thread."""
        pipeline = self.attached.pipeline
        link = self._slowness.link if self._slowness is not None else None
        return SessionMetrics(
            rank=self._context.rank,
            generation=self.log.generation,
            iteration=self.status.iteration,
            replaying=pipeline is not None and pipeline.replaying,
            recoveries=self.status.recoveries,
            committed=self._participant.state.checkpoints.committed,
            in_memory=self._in_memory.newest,
            pace=pace_of(self._participant.state, self._context.rank) / 1000,
            link_busy=link.busy if link is not None else None,
            link_bytes_per_s=link.bytes_per_s if link is not None else None,
            log=self.log.metrics(),
        )

    def forecast(self) -> Forecast:
        """See :meth:`swift_ft.Session.plan`. Planning is imported here: a training needs none of it."""
        from swift_ft.runtime.forecasting import forecast_now

        self._publish_place()
        self._writer.flush(self._context.config.report_timeout_s)  # what this worker has measured
        state = self._participant.state
        dealt = self._dealt if self._iterations is not None else None  # not before all is attached
        return forecast_now(
            self.attached, state, snapshot_every=self._in_memory.every, costs=self._costs, dealt=dealt
        )

    def _publish_place(self) -> None:
        pipeline = self.attached.pipeline
        stages = (pipeline.stages, pipeline.pipeline) if pipeline is not None else ()
        self.profiler.publish_place(Worker(self.attached.holds, *stages))
