"""Carries out the protocol's orders on the training state, in the training thread.

    report ──▶ load ──▶ replay ──▶ live ──▶ iterations ──▶ (a loss) ──▶ report ...

Every way through is a method here; what to do next is the protocol's decision, never this module's.
"""

from __future__ import annotations

import sys
from typing import Any

from swift_ft.config import WorkerContext
from swift_ft.determinism import seed_step
from swift_ft.errors import CannotHelpError, CheckpointError, RecoveryError, SwiftError
from swift_ft.logging import LogOptions, Store
from swift_ft.metrics import SessionMetrics
from swift_ft.planning.forecast import Forecast, forecast
from swift_ft.planning.job import Worker
from swift_ft.recovery import events as ev
from swift_ft.recovery.checkpoint import Checkpointer, CheckpointFolder
from swift_ft.recovery.claim import claim_store
from swift_ft.recovery.coordinator import Coordinator
from swift_ft.recovery.exchange import Exchange, Standing
from swift_ft.recovery.failures import is_broken_communication
from swift_ft.recovery.helping import Helping
from swift_ft.recovery.job_state import State
from swift_ft.recovery.log_peers import LogPeers
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.pipelined import LoggedPipeline
from swift_ft.recovery.plan import Way
from swift_ft.recovery.profiling import Profiler
from swift_ft.recovery.replays import Replays
from swift_ft.recovery.replicated import Replicas
from swift_ft.recovery.reporting import parts_of, report_of
from swift_ft.recovery.rollback import Rollback
from swift_ft.recovery.saving import Saver
from swift_ft.recovery.state import TrainingState
from swift_ft.recovery.worker_log import WorkerLog
from swift_ft.testing.faults import Point, parse_faults
from swift_ft.testing.injector import Injector
from swift_ft.tied import TiedParameters

__all__ = ["Executor"]


class Executor:
    """One worker's training, iteration by iteration, with all ways back.

    Args:
        context: the worker's place.
        store: where logs and checkpoints go.
        state: what is protected.
        checkpoint_every: iterations between global checkpoints.
        keep_checkpoints: committed checkpoints to keep.
        seed: of all random state inside steps.
        log: how messages are logged; the budget is this worker's share.
        groups: by machine; those of one group recover together.
    """

    def __init__(
        self,
        context: WorkerContext,
        store: Store,
        state: TrainingState,
        *,
        checkpoint_every: int,
        keep_checkpoints: int,
        seed: int,
        log: LogOptions,
        groups: tuple[int, ...],
    ) -> None:
        self._standing = Standing()
        self._context = context
        self._store = store
        self._seed = seed
        self._groups = groups
        self._checkpointer = Checkpointer(
            CheckpointFolder(store), state, lambda iteration: self._injector.at(Point.CHECKPOINT, iteration)
        )
        self._rollback = Rollback(state)
        self._log = WorkerLog(store, context, log)
        self._tensors = state.tensors
        self._replayed = 0
        self._recoveries = 0
        self._pipeline: LoggedPipeline | None = None
        self._replays: Replays | None = None
        self._coordinator = Coordinator(
            context,
            self._checkpointer.folder,
            keep_checkpoints=keep_checkpoints,
            before_commit=lambda iteration: self._injector.at(Point.COMMIT, iteration),
            on_committed=self._log.drop_before,
        )
        self._log.share(LogPeers(self._coordinator.rendezvous, context), self._called_off)
        self._injector = Injector(
            parse_faults(context.inject),
            rank=context.rank,
            slot=context.slot,
            agent_pid=context.agent_pid,
            announce=self._coordinator.announce_fault,
            break_connections=self._coordinator.group.abort,
            replaying=lambda: self.replaying,
        )
        self._saver = Saver(context, self._coordinator, self._checkpointer, self._log, every=checkpoint_every)
        self._replicas = Replicas(
            state, self._coordinator.rendezvous, self._coordinator.group, self._injector.live_at
        )
        self.profiler = Profiler(
            context, self._coordinator.rendezvous, state, lambda: self._checkpointer.bytes_per_s
        )
        self._exchange = Exchange(
            context.rank, self._standing, self._replicas, self._rollback, self._coordinator
        )
        for optimizer in state.optimizers.values():
            optimizer.register_step_post_hook(
                lambda *_: self._injector.live_at(Point.OPTIMIZER, self.iteration)
            )

    def attach_pipeline(self, schedule: Any, helping: Helping) -> None:
        """See :meth:`swift_ft.Session.attach_pipeline`."""
        self._pipeline = LoggedPipeline(
            schedule,
            context=self._context,
            groups=self._groups,
            seed=self._seed,
            log=self._log,
            rendezvous=self._coordinator.rendezvous,
            group=self._coordinator.group,
            on_compute=self._injector.computing,
            helping=helping,
        )
        self._replays = Replays(
            self._pipeline,
            self._standing,
            self._replicas,
            self._coordinator,
            own=self._tensors,
            on_help=lambda iteration: self._injector.at(Point.HELP, iteration),
        )

    def attach_ddp(self, model: Any) -> None:
        """See :meth:`swift_ft.Session.attach_ddp`."""
        self._replicas.attach_ddp(model)

    @property
    def iteration(self) -> int:
        """Iterations that the state has completed."""
        return self._standing.iteration

    @property
    def replaying(self) -> bool:
        """Whether the next step is served from the log, to rebuild the state."""
        return self._pipeline is not None and self._pipeline.replaying

    @property
    def tied(self) -> TiedParameters | None:
        """Parameters that this worker's stages share with others; None without a pipeline."""
        return self._pipeline.tied if self._pipeline is not None else None

    @property
    def _until(self) -> int:
        return self._replays.until if self._replays is not None else 0

    # ------------------------------------------------------------------------------------- iterations

    def start(self) -> None:
        """Become part of the job, with or without others that are already at work."""
        context = self._context
        self._tell_place()  # first of all: somebody may wait for it, and all for that one
        topology = {"machines": context.world // context.workers, "workers": context.workers}
        stages = self._pipeline.num_stages if self._pipeline is not None else 1
        checkpoint = claim_store(
            self._store,
            context,
            self._coordinator.rendezvous,
            {**topology, "stages": stages},
            context.timeouts.report_s,
        )
        if checkpoint is not None:
            self._coordinator.tell(ev.Committed(checkpoint, 0))
        if self._pipeline is not None and context.rank == 0 and (why := self._pipeline.why_unaided):
            print(f"swift_ft: parallel recovery is off: {why}", file=sys.stderr, flush=True)
        self.recover()

    def ready_to_step(self) -> None:
        """Make sure that the next step makes sense: recover first, if a loss is already known."""
        coordinator = self._coordinator
        over = self._called_off() if self.replaying else coordinator.disturbed(coordinator.state)
        if over:
            self.recover()

    def _called_off(self) -> bool:
        """Whether nobody asks any more for the replay that this worker last reported for."""
        state = self._coordinator.state
        due = self._coordinator.order(state) == WorkerOrder.EXECUTE
        return not due or state.generation != self._log.handed_over

    def begin(self) -> None:
        """The step of the current iteration begins."""
        self._log.messages.begin_iteration()
        self._rollback.begin(self.iteration)
        self._replicas.begin(self.iteration)
        if self._pipeline is not None:
            self._pipeline.begin(self.iteration, self._replicas.replica)
        # With replicas, whose data differ, random numbers follow from the rank, too.
        seed_step(self._seed, self.iteration, self._context.rank if self._replicas.attached else None)
        mode = "replay" if self.replaying else "live"
        if self.replaying:
            self._injector.at(Point.REPLAY, self.iteration)
        self._coordinator.tell_progress(self.iteration, mode, until=self._until)

    def is_lost_touch(self, error: BaseException) -> bool:
        """Whether an exception in the body of a step comes from broken communication."""
        return is_broken_communication(error, in_backward=self._replicas.broken)

    def complete(self) -> None:
        """The step of the current iteration is done."""
        self._replicas.completed()
        if self._pipeline is not None:
            self._pipeline.completed()
        self._standing.iteration += 1
        account = self._log.messages.end_iteration()
        if self._saver.due(self.iteration):
            self._log.cut()
            self._saver.save(self.iteration)
        if self.replaying:
            self._replayed += 1
            if self.iteration == self._until:
                self._end_replay()
            return
        self.profiler.add(account, self._pipeline.sent if self._pipeline is not None else None)
        if reason := self._wants_checkpoint():
            self._saver.ask(self.iteration, self._log.generation, reason)
        self._injector.at(Point.BETWEEN, self.iteration - 1)

    def _wants_checkpoint(self) -> str:
        """Why one is wanted before it is due; empty if it is not."""
        committed = self._coordinator.state.committed
        if self._log.nearly_full():
            return "the log nears its budget of disk"
        if self._pipeline is not None and self._pipeline.wants_checkpoint(committed):
            return "a stage was rebuilt with other roundings"
        return ""

    def interrupted(self, cause: str, failure: RecoveryError | None) -> None:
        """The step was interrupted by a broken connection, or its replay turned out impossible."""
        coordinator = self._coordinator
        coordinator.group.abort()
        self._log.messages.interrupted()
        self._replicas.settle()
        self._standing.dirty, self._standing.updated = self._rollback.dirty(), self._replicas.updated()
        generation = self._log.generation
        joint = self._pipeline is not None and self._pipeline.joint
        if self.replaying and failure is None and not joint:
            failure = RecoveryError(
                "the body of the step communicates outside of the pipeline, "
                f"which a replay cannot do ({cause})"
            )
        if self._pipeline is not None:
            self._pipeline.reset()
        self._rollback.back()
        if failure is not None:
            kind = ev.CannotHelp if isinstance(failure, CannotHelpError) else ev.CannotReplay
            coordinator.tell(kind(self._context.rank, generation, str(failure)))
        else:
            coordinator.lose_touch(cause)
        self.recover()

    def finish(self) -> bool:
        """Wait for everybody's last iteration; False if there is more to do after all."""
        coordinator = self._coordinator
        state = coordinator.state
        if coordinator.disturbed(state):
            self.recover()
            return False
        self._log.flush()
        self._saver.wait_for_part()
        coordinator.tell_progress(self.iteration, "finished", bytes_logged=self.bytes_logged)
        coordinator.tell(ev.Finished(self._context.rank, state.generation))
        state = coordinator.wait_for_finish()
        if coordinator.disturbed(state):
            self.recover()
            return False
        self._saver.finish(self.iteration)
        coordinator.settle(self._context.timeouts.checkpoint_s)
        self._log.close()
        return True

    # --------------------------------------------------------------------------------------- recovery

    def recover(self) -> None:
        """Do as ordered until there is a step to run: live, or in a replay."""
        coordinator = self._coordinator
        coordinator.leave_generation()
        self._injector.at(Point.LEAVE, self.iteration)
        while True:
            order, state = coordinator.next_order()
            if order == WorkerOrder.REPORT:
                self._report(state)
            elif order == WorkerOrder.EXECUTE:
                try:
                    if self._execute(state):
                        return
                except (RecoveryError, CheckpointError) as error:
                    self._cannot(state, error)
            elif order == WorkerOrder.RUN:
                try:
                    if self._go_live(state):
                        return
                except RecoveryError as error:
                    coordinator.leave_group()
                    self._cannot(state, error)

    def _cannot(self, state: State, error: SwiftError) -> None:
        if self._pipeline is not None:
            self._pipeline.give_up_replay()
        self._coordinator.tell(ev.CannotReplay(self._context.rank, state.generation, str(error)))

    def _report(self, state: State) -> None:
        """Flush the log, then say where the state stands."""
        pipeline, standing = self._pipeline, self._standing
        live = standing.known and not self.replaying
        if state.generation > 1:
            self._injector.at(Point.REPORT, self.iteration)
        # What comes from a replica, and not from a replay, is not logged again: the store must have its log.
        self._log.hand_over(state.generation, shipped=self._replicas.attached)
        if pipeline is not None:
            pipeline.give_up_replay()
        self._coordinator.tell_progress(self.iteration, "waiting")
        self._coordinator.tell(
            report_of(
                self._context,
                state.generation,
                standing,
                live=live,
                group=self._groups[self._context.slot],
                pipeline=pipeline,
                replicas=self._replicas,
            )
        )

    def _execute(self, state: State) -> bool:
        """Do this worker's task. True when a replay begins: its steps run in the user's own loop."""
        assert state.plan is not None
        task, standing = state.plan.tasks[self._context.rank], self._standing
        shared = state.plan.shared_by(self._context.rank)
        if shared is not None and self._context.rank in shared.helpers:
            assert self._replays is not None
            if self._replays.help(state, shared, self.iteration):
                self._ready(state.generation)
            return False
        if task.load is not None:
            self._injector.at(Point.LOAD, task.load)
            self._coordinator.tell_progress(self.iteration, "loading")
            standing.known = False  # while it is only half there
            self._checkpointer.load(task.load, self._context.rank)
            standing.dirty, standing.updated = None, ()
        standing.iteration = task.begin
        self._log.open(state.generation, since=state.log_since)
        if task.begin < task.replay_until:
            assert self._replays is not None
            self._replayed = 0
            return self._replays.begin(state, task, shared)
        self._standing.known = True
        self._ready(state.generation)
        return False

    def _end_replay(self) -> None:
        """The state stands at the consensus iteration: go live with the others."""
        assert self._pipeline is not None
        self._log.flush()
        self._pipeline.give_up_replay()
        self._coordinator.keep_group()
        self._ready(self._log.generation)
        self.recover()

    def _ready(self, generation: int) -> None:
        self._coordinator.tell(
            ev.Ready(self._context.rank, generation, self._replayed, *self._log.fetched.take())
        )
        self._replayed = 0

    def _go_live(self, state: State) -> bool:
        """Form the group, make replicas equal, serve the interrupted iteration if it is completed here."""
        plan, coordinator = state.plan, self._coordinator
        assert plan is not None
        task = plan.tasks[self._context.rank]
        if task.undo:
            if task.begin < self.iteration:  # it was completed: from here on it is one that was interrupted
                self._rollback.back_to(task.begin)
                self._standing.iteration, self._standing.updated = task.begin, task.undo
            self._replicas.undo(task)  # told as updated until all are equal: roundings make it no original
        if self._pipeline is not None:
            self._pipeline.prepare(plan)
        self._log.open(state.generation, since=state.log_since)
        self._injector.at(Point.JOIN, self.iteration)
        if not coordinator.enter_group(state.generation):
            return False
        self._replicas.reset(plan.resume, warm_up=plan.warm_up)
        cause = self._exchange.carry_out(plan)
        if cause is None and plan.way == Way.START:
            cause = self.profiler.measure()
        if cause is None and task.serve and self._pipeline is not None:
            cause = self._pipeline.serve(state, plan)
        if cause is not None:
            coordinator.lose_touch(cause)
            return False
        self._standing.is_whole()
        self._recoveries += plan.way != Way.START
        if state.committed is None and plan.way == Way.START:
            self._saver.save(self.iteration)  # so that there is always a checkpoint to return to
        return True

    # ---------------------------------------------------------------------------- logs and checkpoints

    def metrics(self) -> SessionMetrics:
        """See :meth:`swift_ft.Session.metrics`."""
        committed, log = self._coordinator.state.committed, self._log
        return SessionMetrics(
            *(self._context.rank, log.generation, self.iteration, self.replaying, self._recoveries),
            *(committed, log.metrics()),
        )

    def forecast(self) -> Forecast:
        """See :meth:`swift_ft.Session.plan`."""
        self._tell_place()
        return forecast(self.profiler.job(groups=self._groups, checkpoint_every=self._saver.every))

    def _tell_place(self) -> None:
        pipeline = self._pipeline
        stages = (pipeline.stages, pipeline.pipeline) if pipeline is not None else ()
        self.profiler.tell_place(Worker(parts_of(pipeline), *stages))

    @property
    def bytes_logged(self) -> int:
        """Payload that this worker has logged."""
        return self._log.bytes_logged
