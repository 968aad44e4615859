"""Carries out the protocol's orders on the training state, in the training thread.

    report ──▶ execute (help, load, replay) ──▶ go live ──▶ iterations ──▶ (a loss) ──▶ report ...

Each order is a method here. What to do next is the protocol's decision, never this module's.
"""

from __future__ import annotations

import logging

from swift_ft.errors import CheckpointError, RecoveryError, SwiftError
from swift_ft.faults.failpoints import Point, hit
from swift_ft.observe.spans import recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder, saves_again
from swift_ft.recovery.plan import Plan, RecoveryMode, Task
from swift_ft.recovery.timeline import lost_statistics
from swift_ft.runtime.collaborators import Collaborators
from swift_ft.runtime.report import failure_event, status_report
from swift_ft.torch_adapters.versions.buffer_sync import BUFFER_SYNC

__all__ = ["Executor"]

_logger = logging.getLogger(__name__)

_WAITS_FOR = {
    WorkerOrder.REPORT: "wait for a generation",
    WorkerOrder.EXECUTE: "wait for the plan",
    WorkerOrder.RUN: "wait until all are ready",
}
"""What an order ends: a span of a recovery's trace."""


class Executor:
    """One worker's recoveries.

    Args:
        collaborators: the parts of the worker's runtime.
    """

    def __init__(self, collaborators: Collaborators) -> None:
        self._rank = collaborators.context.rank
        self._context = collaborators.context
        self._recovery_group = collaborators.recovery_group
        self._status = collaborators.status
        self._participant = collaborators.participant
        self._groups = collaborators.groups
        self._progress = collaborators.progress
        self._writer = collaborators.writer
        self._log = collaborators.log
        self._checkpointer = collaborators.checkpointer
        self._part_peers = collaborators.part_peers
        self._saver = collaborators.saver
        self._snapshots = collaborators.snapshots
        self._rollback = collaborators.rollback
        self._shards = collaborators.shards
        self._between = collaborators.between
        self._replicas = collaborators.replicas
        self._prepared = collaborators.prepared
        self._state_sync = collaborators.state_sync
        self._profiler = collaborators.profiler
        self._pipeline = collaborators.pipeline
        self._replays = collaborators.replays
        self._repartition = collaborators.repartition
        self._dealt = collaborators.dealt

    def recover(self) -> None:
        """Follow orders until there is a step to run, live or in a replay."""
        recorder.woke()
        recorder.lap()
        with recorder.span("leave the group"):
            self._groups.leave_generation()
        hit(Point.LEAVE, self._status.iteration)
        has_step = False
        while not has_step:
            began = recorder.now()
            order, state = self._participant.next_order()
            recorder.add(_WAITS_FOR.get(order, ""), began)
            match order:
                case WorkerOrder.REPORT:
                    with recorder.span("report", generation=state.generation):
                        self._report(state)
                case WorkerOrder.EXECUTE:
                    with recorder.span("do the task"):
                        has_step = self._execute(state)
                    if has_step:
                        recorder.lap("replay", begin=self._status.iteration)
                case WorkerOrder.RUN:
                    with recorder.span("go live"):
                        has_step = self._run(state)

    def end_replay(self) -> None:
        """The state has reached the consensus iteration: go live with the others.

        The log's end is written meanwhile. Others need it after another loss only, and this worker's next
        report waits for it.
        """
        assert self._pipeline is not None
        recorder.lap()
        self._pipeline.end_replay()
        self._groups.keep()
        self._ready(self._log.generation)
        self.recover()

    def give_up_replay(self, error: RecoveryError) -> None:
        """The state that a replay has rebuilt is not the lost worker's: another way back is needed."""
        self._status.known = False
        self._fail(self._participant.state, error)
        self.recover()

    # ----------------------------------------------------------------------------------------- report

    def _report(self, state: State) -> None:
        """Flush the log, then report the worker's status."""
        live = self._status.known
        if (pipeline := self._pipeline) is not None and pipeline.shared_layers is None:
            live = live and not pipeline.replaying
        if state.generation > 1:
            hit(Point.REPORT, self._status.iteration)
        # State that comes from a replica, and not from a replay, is not logged again, so the store must have
        # the log.
        if self._repartition is not None:
            self._repartition.settle(state)
        script = self._pipeline is not None and self._pipeline.script.logged
        if self._part_peers is not None:
            with recorder.span("offer parts"):
                self._part_peers.offer(state.round.asked_in)
        with recorder.span("seal the log"):
            self._log.seal_and_offer(state.round.asked_in, uploaded=self._replicas.attached or script)
        if self._pipeline is not None:
            self._pipeline.end_replay()
        self._progress.publish(self._status.iteration, "waiting")
        with recorder.span("flush notes"):  # a replacement reads what was noted
            self._writer.flush(self._context.config.report_timeout_s)
        self._prepared.forget()
        reported = self._participant.append(
            status_report(
                self._context,
                state.generation,
                self._status,
                live=live,
                recovery_group=self._recovery_group,
                pipeline=self._pipeline,
                shards=self._shards,
                replicas=self._replicas,
                rollback=self._rollback,
                log=self._log,
                snapshots=self._snapshots,
            )
        )
        if self._pipeline is None and self._participant.order(reported) == WorkerOrder.HOLD:
            with recorder.span("prepare to send"):
                self._prepared.prepare_early()

    # ---------------------------------------------------------------------------------------- execute

    def _execute(self, state: State) -> bool:
        """Do this worker's task. True when a replay begins: its steps run in the user's own loop."""
        plan = state.plan
        assert plan is not None
        task, shared = plan.tasks[self._rank], plan.parallel_replay_of(self._rank)
        try:
            if shared is not None and self._rank in shared.helpers:
                self._help(state, shared)
                return False
            if plan.new_layout is not None:
                assert self._repartition is not None
                if not self._repartition.move(state):
                    return False
            if task.load is not None:
                with recorder.span("load", iteration=task.load, memory=task.holder is not None):
                    self._load(state, task.load, task)
                self._status.parts_done = None  # a checkpoint comes after them
            self._status.iteration = task.begin
            with recorder.span("open own log"):
                self._log.open(state.generation, since=state.checkpoints.log_since, begin=task.begin)
            if task.begin < task.replay_until:
                assert self._replays is not None
                return self._replays.begin(state, task, shared)
        except (RecoveryError, CheckpointError) as error:
            self._fail(state, error)
            return False
        self._status.known = True
        self._ready(state.generation)
        return False

    def _help(self, state: State, shared: ParallelReplay) -> None:
        assert self._replays is not None
        with recorder.span("help", owners=shared.owners):
            done = self._replays.help(state, shared, self._status.iteration)
        if done:
            self._ready(state.generation)

    def _load(self, state: State, iteration: int, task: Task) -> None:
        hit(Point.LOAD, iteration)
        self._progress.publish(self._status.iteration, "loading")
        self._status.known = False  # while only a part of it is there
        layout = self._repartition.adopt(state) if self._repartition is not None else None
        if task.holder is None:
            self._checkpointer.load(iteration, self._rank, layout, self._context.world_size)
        else:
            self._snapshots.load(task)
        self._status.dirty, self._status.updated = None, ()

    def _ready(self, generation: int) -> None:
        from_peers, from_store = self._log.fetch_stats.take()
        loaded = self._checkpointer.files.take_loaded()
        replayed = self._replays.take_replayed() if self._replays is not None else 0
        self._participant.append(
            ev.WorkerReady(
                rank=self._rank,
                generation=generation,
                replayed=replayed,
                from_peers=from_peers,
                from_store=from_store,
                received=self._repartition.received_bytes if self._repartition is not None else 0,
                loaded_own=loaded.own_disk,
                loaded_peers=loaded.peers,
                loaded_store=loaded.store,
            )
        )

    def _fail(self, state: State, error: SwiftError) -> None:
        """The order cannot be carried out: say why, and leave the next one to the protocol."""
        if self._pipeline is not None:
            self._pipeline.end_replay()
        self._participant.append(
            failure_event(error, self._rank, state.generation, self._checkpointer.unverified)
        )

    # ---------------------------------------------------------------------------------------- go live

    def _run(self, state: State) -> bool:
        """Go live. False if another order is due."""
        try:
            return self._go_live(state)
        except RecoveryError as error:
            self._groups.leave()
            self._fail(state, error)
            return False

    def _go_live(self, state: State) -> bool:
        """Form the group, make replicas equal, and resend the interrupted iteration if it is done here."""
        plan = state.plan
        assert plan is not None
        task = plan.tasks[self._rank]
        if (source := lost_statistics(plan, state.round.statuses).get(self._rank)) is not None:
            _logger.warning(
                "Worker %d loses its own running statistics (BatchNorm) and goes on with those of worker %d. "
                "With %s=True, DDP keeps them equal on all replicas, except in pipelines.",
                self._rank,
                source,
                BUFFER_SYNC,
                extra={"event": "statistics_lost"},
            )
        if self._repartition is not None and self._status.known:
            self._repartition.settle(state)
        elif self._repartition is not None:  # all that belongs here is about to come
            self._repartition.adopt(state)
        if task.undo or task.back:
            with recorder.span("undo", parameters=len(task.undo)):
                self._undo(task)
        if plan.parts_from is not None and self._status.iteration == plan.resume:
            self._between.go_back(plan.resume, plan.parts_from)
        if self._pipeline is not None:
            with recorder.span("prepare the pipeline"):
                self._pipeline.prepare(state, plan)
        with recorder.span("open own log"):
            self._log.open(state.generation, since=state.checkpoints.log_since, begin=self._status.iteration)
        self._dealt.follow(state.layouts.shares)
        keeps = task.load is None and not (task.undo or task.back) and plan.parts_from is None
        with recorder.span("prepare to send"):
            self._prepared.prepare(
                plan, unchanged=keeps and not (self._pipeline or self._repartition or self._dealt)
            )
        hit(Point.JOIN, self._status.iteration)
        if not self._groups.enter(state.generation):
            return False
        with recorder.span("reset replicas"):
            self._replicas.reset(plan.resume)
        if (cause := self._communicate(state, plan, task)) is not None:
            self._groups.on_connection_broken(cause)
            return False
        self._status.set_whole()
        if self._part_peers is not None:
            self._part_peers.withdraw()
        self._snapshots.live(state)
        self._status.recoveries += plan.mode != RecoveryMode.START
        if self._settle(plan):
            return True
        if state.checkpoints.committed is None and plan.mode in (RecoveryMode.START, RecoveryMode.MEMORY):
            self._saver.save(self._status.iteration)  # so that there is always a checkpoint to return to
        elif plan.new_layout is not None:
            self._saver.save(self._status.iteration)  # the logs of before are of no use
        elif self._saver.due(self._status.iteration) and saves_again(state, self._rank):
            self._saver.save(self._status.iteration)
        return True

    def _settle(self, plan: Plan) -> bool:
        """Whether parts of the script come before the next step, and the checkpoint after them."""
        status, between = self._status, self._between
        if plan.parts_from is not None:
            status.parts_done, between.repeats = plan.parts_from, True
        elif status.parts_done is not None and status.iteration == plan.resume:
            due = len(between.due(status.iteration))
            between.take_over(status.iteration, due, begin=status.parts_done)
            status.parts_done = due
        else:
            status.parts_done = None
        return status.parts_done is not None

    def _undo(self, task: Task) -> None:
        if task.begin < self._status.iteration:  # it was completed, and counts as interrupted from here on
            self._rollback.back_to(task.begin)
            self._status.iteration, self._status.updated = task.begin, task.undo
        # The parameters are reported as updated until all replicas are equal: an undo rounds, so they are not
        # the original.
        self._replicas.undo(task)
        self._rollback.undone()

    def _communicate(self, state: State, plan: Plan, task: Task) -> str | None:
        """All that workers exchange before the first step. Returns why it was interrupted, or None."""
        with recorder.span("make replicas equal", transfers=len(plan.transfers)):
            cause = self._state_sync.apply_transfers(plan)
        if cause is None and plan.mode == RecoveryMode.START:
            cause = self._profiler.measure()
        if cause is None and task.resend_from_log and self._pipeline is not None:
            with recorder.span("resend"):
                cause = self._pipeline.resend_from_log(state, plan)
        return cause
