"""The core of a worker: it follows the protocol's orders, and acts around each step of the script.

All of it are decisions. Calls that may wait are yielded to whoever drives the flows (`flow.py`): a worker
(`runtime/iterations.py`), the simulation, or a test.

                       ┌── a loss ◀──────────────────────────────────────────┐
start ─▶ recover: REPORT ─▶ EXECUTE (load, move, help) ─▶ RUN ─▶ begin ─▶ completed ─▶ ... ─▶ finish
                                        └▶ begin ─▶ completed: replayed steps ─▶ recover

A worker of the next world begins with PREPARE and TAKE, and reports once its world has taken over.
"""

from __future__ import annotations

from swift_ft.errors import CheckpointError, DivergenceError, RecoveryError, SwiftError
from swift_ft.faults.failpoints import Point, hit
from swift_ft.recovery import events as ev
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder, leaves_after_checkpoint, saves_again
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.runtime.worker.flow import Call, Flow
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.runtime.worker.ports import Ports
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.runtime.worker.world_change import WorldChange

_WAITS_FOR = {
    WorkerOrder.REPORT: "wait for a generation",
    WorkerOrder.EXECUTE: "wait for the plan",
    WorkerOrder.RUN: "wait until all are ready",
}
"""The wait that an order ends: a span of a recovery's trace."""


class WorkerCore:
    """One worker.

    Args:
        rank: its rank.
        status: the iteration and the condition of its state.
        parts: how it is protected, measured and watched, called as one.
        ports: its surroundings.

    Attributes:
        generation: in which it trains, or replays.
        step: the one that runs, or ran last.
        next: the iteration that is about to begin, or runs; None where layers may move. The journal thread
            reads it.
    """

    def __init__(self, rank: int, status: WorkerStatus, parts: Part, ports: Ports) -> None:
        self.rank = rank
        self.status = status
        self.parts = parts
        self.generation = 0
        self.step = StepInfo(0, 0)
        self.next: int | None = None
        self._asked_in = 0  # the generation that asked for the report on which the plan is based
        self._job = ports.job
        self._links = ports.links
        self._replays = ports.replays
        self._layers = ports.layers
        self._checkpoints = ports.checkpoints
        self._hooks = ports.hooks
        self._change = WorldChange(rank, status, ports.job, ports.handover)
        self._verification = ports.verification
        self._recorder = ports.recorder

    # --------------------------------------------------------------------------------------- recovery

    def recover(self) -> Flow[None]:
        """Follow orders until there is a step to run, live or in a replay."""
        self.next = None  # also where it comes from the script's end
        self._recorder.woke()
        self._recorder.lap()
        with self._recorder.span("leave the group"):
            self._links.leave_generation()
        if self.generation or self._job.state.generation > 1:  # else it starts, as all others do
            hit(Point.LEAVE, self.status.iteration)
        has_step = False
        while not has_step:
            began = self._recorder.now()
            order, state = yield self._job.next_order
            self._recorder.add(_WAITS_FOR.get(order, ""), began)
            match order:
                case WorkerOrder.PREPARE:
                    yield from self._change.prepare(state)
                case WorkerOrder.TAKE:
                    with self._recorder.span("take the state"):
                        yield from self._change.take(state)
                case WorkerOrder.OFFER:
                    with self._recorder.span("offer the state"):
                        yield from self._change.offer()
                case WorkerOrder.REPORT:
                    with self._recorder.span("report", generation=state.generation):
                        yield from self._report(state)
                case WorkerOrder.EXECUTE:
                    with self._recorder.span("do the task"):
                        has_step = yield from self._execute(state)
                    if has_step:
                        self._recorder.lap("replay", begin=self.status.iteration)
                case WorkerOrder.RUN:
                    with self._recorder.span("go live"):
                        has_step = yield from self._run(state)

    def _report(self, state: State) -> Flow[None]:
        """Let others read what is logged, then report the status of the state."""
        status = self.status
        live = status.known and not self._replays.behind
        if state.generation > 1:
            hit(Point.REPORT, status.iteration)
        self._asked_in = state.round.asked_in
        self._change.withdraw()  # what it offered after a loss, if that led to nothing
        yield Call(self.parts.settle, state)
        self._replays.end()
        yield self._checkpoints.flush_notes  # a replacement reads them
        report = self.parts.report(
            ev.StatusReported(
                rank=self.rank,
                generation=state.generation,
                iteration=status.iteration if status.known else None,
                live=live,
                pipeline_known=True,
                dirty=status.dirty,
                updated=status.updated,
                can_resend=False,
                steps=status.steps,
                parts_done=status.parts_done,
                parts_due=self._hooks.due(status.iteration),
                fresh=status.fresh,
            )
        )
        reported = yield Call(self._job.append, report)
        # All workers of another world have the same state as it begins, so nobody has to be sent one.
        begins = reported.worlds.present.begins_at(status.iteration)
        if self._job.order(reported) == WorkerOrder.HOLD and not begins:
            self.parts.idle()

    def _execute(self, state: State) -> Flow[bool]:
        """Do this worker's task. True when a replay begins: its steps run in the user's own loop."""
        plan = state.plan
        assert plan is not None
        task, shared = plan.tasks[self.rank], plan.parallel_replay_of(self.rank)
        try:
            if shared is not None and self.rank in shared.helpers:
                yield from self._help(state, shared)
                return False
            if plan.new_layout is not None and not (yield Call(self._layers.move, state)):
                return False
            if task.load is not None:
                yield from self._load(state)
            self.status.iteration = task.begin
            self._open(state)
            if task.begin < task.replay_until:
                begun: bool = yield Call(self._replays.begin, state, task, shared)
                return begun
        except (RecoveryError, CheckpointError) as error:
            yield from self._fail(state.generation, error)
            return False
        self.status.known = True
        yield from self._ready(state.generation)
        return False

    def _help(self, state: State, shared: ParallelReplay) -> Flow[None]:
        with self._recorder.span("help", owners=shared.owners):
            done = yield Call(self._replays.help, state, shared, self.status.iteration)
        if done:
            yield from self._ready(state.generation)

    def _load(self, state: State) -> Flow[None]:
        task = Round.of(self.rank, state).task
        assert task.load is not None
        with self._recorder.span("load", iteration=task.load, memory=task.holder is not None):
            hit(Point.LOAD, task.load)
            self.status.known = self.status.fresh = False  # while only a part of it is there
            yield Call(self._checkpoints.load, state, task)
        self.status.dirty, self.status.updated = None, ()
        self.status.parts_done = None  # a checkpoint comes after them

    def _open(self, state: State) -> None:
        self.generation = state.generation
        self.parts.open(state, self.status.iteration)

    def _ready(self, generation: int) -> Flow[None]:
        replayed, self._replays.replayed = self._replays.replayed, 0
        ready = ev.WorkerReady(rank=self.rank, generation=generation, replayed=replayed)
        yield Call(self._job.append, self.parts.ready(ready))

    def _fail(self, generation: int, error: SwiftError) -> Flow[None]:
        """The order cannot be carried out: say why, and leave the next one to the protocol."""
        self._replays.end()
        yield Call(self._job.append, self._checkpoints.failure(error, generation))

    def _run(self, state: State) -> Flow[bool]:
        """Go live. False if another order is due."""
        try:
            return (yield from self._go_live(Round.of(self.rank, state)))
        except RecoveryError as error:
            self._links.leave()
            yield from self._fail(state.generation, error)
            return False

    def _go_live(self, round: Round) -> Flow[bool]:
        """Form the group, become equal to replicas, and have all that the interrupted iteration needs."""
        state, plan, status = round.state, round.plan, self.status
        yield Call(self.parts.prepare, round)
        self._open(state)
        hit(Point.JOIN if state.generation > 1 else Point.START, status.iteration)
        if not (yield Call(self._links.enter, state.generation)):
            return False
        status.fresh = status.fresh and not plan.transfers  # what comes may come in part
        if (cause := (yield Call(self.parts.join, round))) is not None:
            yield Call(self._links.on_connection_broken, cause)
            return False
        status.set_whole()
        self.parts.live(round)
        status.recoveries += plan.mode != RecoveryMode.START
        self._settle_hooks(plan)
        if status.parts_done is None and self._saves_at_once(state, plan):
            with self._recorder.span("copy the state for a checkpoint"):
                yield Call(self._checkpoints.save, status.iteration)
        return True

    def _saves_at_once(self, state: State, plan: Plan) -> bool:
        """Whether a checkpoint comes before the first step."""
        if state.checkpoints.committed is None and plan.mode in (RecoveryMode.START, RecoveryMode.MEMORY):
            return True  # so that there is always a checkpoint to return to
        if plan.new_layout is not None:
            return True  # the logs of before are of no use
        iteration = self.status.iteration
        if self._checkpoints.due(iteration) and self._has_begun_at(iteration):
            return True  # that of the world before does not count
        return self.due(iteration) and saves_again(state, self.rank)

    def _has_begun_at(self, iteration: int) -> bool:
        """Whether another world has begun there, and has no checkpoint yet."""
        state = self._job.state
        return state.worlds.present.begins_at(iteration) and not state.checkpoints.covers(iteration)

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint follows the completion of this many iterations.

        One follows the first iteration of another world. Before it, all would wait for the copies.
        """
        due = self._checkpoints.due
        return due(iteration) or (self._has_begun_at(iteration - 1) and not due(iteration - 1))

    def _settle_hooks(self, plan: Plan) -> None:
        """Decide from which of its functions on the script goes on; the checkpoint comes after them."""
        status, hooks = self.status, self._hooks
        if plan.parts_from is not None:
            status.parts_done, hooks.repeats = plan.parts_from, True
        elif status.parts_done is not None and status.iteration == plan.resume:
            due = hooks.due(status.iteration)
            hooks.take_over(status.iteration, due, begin=status.parts_done)
            status.parts_done = due
        else:
            status.parts_done = None

    # ------------------------------------------------------------------------------------------ steps

    def ready_to_step(self) -> Flow[None]:
        """Recover first, if a loss is already known."""
        self._hooks.check()
        job = self._job
        if job.replay_cancelled(self._asked_in) if self._replays.active else job.is_cancelled():
            self.parts.pause()
            yield from self.recover()

    def begin(self, *, repeatable: bool = True) -> StepInfo:
        """The step of the current iteration begins.

        Args:
            repeatable: see :class:`StepInfo`.
        """
        replayed = self._replays.active
        until = self._replays.until if replayed else 0
        self.step = StepInfo(self.status.iteration, self.generation, replayed, until, repeatable)
        self.step.computation = self._verification.computation(self.step)
        self.parts.begin(self.step)
        if replayed:
            hit(Point.REPLAY, self.step.iteration)
        return self.step

    def completed(self) -> Flow[None]:
        """The step is done. It counts, unless it is run again: to verify it, or after a loss meanwhile."""
        if self.step.computation:
            yield from self._judged()
        else:
            yield from self._count()

    def _judged(self) -> Flow[None]:
        judgement = yield Call(self._verification.judge, self.step)
        if judgement.cause is not None:
            yield from self.interrupted(judgement.cause, None)
        elif judgement.again:
            self.parts.again(self.step)
        else:
            yield from self._count()

    def _count(self) -> Flow[None]:
        step, status = self.step, self.status
        self.parts.completed(step)
        self.next = None
        status.iteration = step.completed
        if step.replayed:
            yield from self._completed_replayed()
            return
        self._links.destroy_left()
        if self._hooks.due(status.iteration):
            status.parts_done = 0  # the rest follows in settle()
        else:
            yield from self._reach_boundary()

    def settle(self) -> Flow[bool]:
        """Do what the script does between two steps, as far as that is due.

        Returns:
            False if a loss interrupted it: begin again with :meth:`ready_to_step`.
        """
        status = self.status
        while status.parts_done is not None:
            if status.parts_done >= self._hooks.due(status.iteration):
                status.parts_done, self._hooks.repeats = None, False
                yield from self._reach_boundary()
                continue
            self.parts.pause()
            cause = yield Call(self._hooks.do, status.iteration, status.parts_done, self.generation)
            if cause is not None:
                yield from self._interrupted_between(cause)
                return False
            status.parts_done += 1
        return True

    def _interrupted_between(self, cause: str) -> Flow[None]:
        self._hooks.check()
        self._links.abort()
        interruption = Interruption(in_step=False)
        self.parts.interrupted(interruption)
        self.parts.put_back(interruption)
        yield Call(self._links.on_connection_broken, cause)
        yield from self.recover()

    def _reach_boundary(self) -> Flow[None]:
        """All that belongs to the completed iterations is done."""
        if not (yield from self._save_if_due()):
            return
        # Not the step that ran last: after a loss there may be none yet in this generation.
        yield Call(self.parts.boundary, StepInfo(self.status.iteration - 1, self.generation))
        if reason := self._why_checkpoint():
            self._checkpoints.request(self.status.iteration, self.generation, reason)
        hit(Point.BETWEEN, self.status.iteration - 1)

    def _why_checkpoint(self) -> str:
        """Why a checkpoint is needed before the regular one; empty if it is not."""
        state = self._job.state
        if reason := self.parts.why_checkpoint(state.checkpoints.committed):
            return reason
        leaving = leaves_after_checkpoint(state)
        return f"{', '.join(leaving)} is asked to leave" if leaving else ""

    def _save_if_due(self) -> Flow[bool]:
        """False if the state turned out not to be what a replay has to rebuild."""
        iteration = self.status.iteration
        if not self.due(iteration):
            return True
        try:
            yield Call(self._checkpoints.save, iteration, replaying=self._replays.active)
        except DivergenceError as error:
            yield from self._give_up_replay(error)
            return False
        return True

    def _completed_replayed(self) -> Flow[None]:
        status, replays, hooks = self.status, self._replays, self._hooks
        due, ends = hooks.due(status.iteration), status.iteration == replays.until
        until = due if replays.parts_from is None or not ends else replays.parts_from
        try:
            hooks.take_over(status.iteration, until)
        except RecoveryError as error:
            yield from self._give_up_replay(error)
            return
        if until < due:
            status.parts_done = until  # the checkpoint follows them
        elif not (yield from self._save_if_due()):
            return
        replays.replayed += 1
        if ends:
            yield from self._end_replay()

    def _end_replay(self) -> Flow[None]:
        """The state has reached the consensus iteration: go live with the others.

        The log's end is written meanwhile. Others need it after another loss only, and this worker's next
        report waits for it.
        """
        self._recorder.lap()
        self._replays.end()
        self._links.keep()
        yield from self._ready(self.generation)
        yield from self.recover()

    def _give_up_replay(self, error: RecoveryError) -> Flow[None]:
        """The state that a replay has rebuilt is not the lost worker's: another way back is needed."""
        self.status.known = False
        yield from self._fail(self._job.state.generation, error)
        yield from self.recover()

    def interrupted(self, cause: str, failure: RecoveryError | None, *, caught: bool = False) -> Flow[None]:
        """The step was interrupted.

        Args:
            cause: the first line of the error of the broken communication.
            failure: why a replay turned out to be impossible, if that is what happened.
            caught: the script has caught the error, and may have updated with gradients of its own.
        """
        self._hooks.check()
        self.parts.pause()
        others_stop = self.layers_move_next
        if not others_stop:
            self._recorder.begin()  # the journal may not have the loss yet
        self._recorder.woke()
        self._recorder.lap("tear down")
        self._links.abort()
        if self.step.replayed and failure is None and not self._replays.joint:
            failure = RecoveryError(
                "the body of the step communicates outside of the pipeline, "
                f"which a replay cannot do ({cause})"
            )
        interruption = Interruption(caught=caught)
        self.status.dirty = None
        self.parts.interrupted(interruption)
        self.parts.put_back(interruption)
        if failure is None and others_stop and (yield from self._stop_for_layout()):
            return
        if failure is not None:
            yield Call(self._job.append, self._checkpoints.failure(failure, self.generation))
        else:
            yield Call(self._links.on_connection_broken, cause)
        yield from self.recover()

    # ------------------------------------------------------------------------------------ other layouts

    @property
    def layers_move_next(self) -> bool:
        """Whether all workers stop before the iteration that this one's state is at, because layers move."""
        pending = self._job.state.layouts.pending
        return pending is not None and pending.iteration == self.status.iteration

    def stops_for_layout(self) -> Flow[bool]:
        """Whether all workers stop before the next iteration, because layers move. If so, recover first."""
        self.next = self.status.iteration  # before the look at the state: the journal thread looks here after
        if self._replays.active or not self.layers_move_next:
            return False
        stopped = yield from self._stop_for_layout()
        if not stopped:  # it was given up, and this iteration begins after all
            self.next = self.status.iteration
        return stopped

    def _stop_for_layout(self) -> Flow[bool]:
        """Wait for the others. False if layers do not move after all, and this generation goes on."""
        self.next = None
        self.parts.pause()
        pending = self._job.state.layouts.pending
        if pending is not None and pending.world:
            yield from self._change.offer()
        else:
            stopped = ev.LayoutBoundaryReached(
                rank=self.rank, generation=self.generation, iteration=self.status.iteration
            )
            yield Call(self._job.append, stopped)
        state = yield self._job.wait_for_others
        self._change.withdraw()
        if not self._job.generation_over(state):
            if not state.membership.ended:
                return False
            yield Call(self._links.on_connection_broken, "the script of another worker has left its loop")
        yield from self.recover()
        return True

    # -------------------------------------------------------------------------------------------- end

    def finish(self) -> Flow[bool]:
        """Wait until all workers have completed the last iteration. False if there are more steps to run."""
        self.parts.pause()
        state = self._job.state
        if self._job.generation_over(state):
            yield from self.recover()
            return False
        last = self.status.iteration
        begun = self._has_begun_at(last)  # and no iteration is left
        if begun and not self._checkpoints.due(last):  # else it is being saved: see `_saves_at_once`
            yield Call(self._checkpoints.save, last)
        yield self.parts.finish
        self._hooks.check()
        hit(Point.END, last)
        saves = last if begun or self._checkpoints.regular(last) else None
        finished = ev.WorkerFinished(rank=self.rank, generation=state.generation, saves=saves)
        yield Call(self._job.append, finished)
        state = yield self._job.wait_for_finish
        if self._job.generation_over(state):
            yield from self.recover()
            return False
        yield self.parts.close
        return True

    def leave(self) -> Flow[None]:
        """The script leaves its loop before the end: what was begun for the store is still done."""
        yield self.parts.finish
        yield Call(self._checkpoints.leave, self.status.iteration)
