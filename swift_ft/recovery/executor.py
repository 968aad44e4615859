"""Carries out the protocol's orders on the training state, in the training thread.

    report ──▶ load ──▶ replay ──▶ live ──▶ iterations ──▶ (a loss) ──▶ report ...

Every way through is a method here; what to do next is the protocol's decision, never this module's.
"""

from __future__ import annotations

import json
from typing import Any

from swift_ft.config import WorkerContext
from swift_ft.determinism import derive_seed, seed_torch
from swift_ft.errors import RecoveryError
from swift_ft.logging import Direction, Store
from swift_ft.pipeline import PipelineHook
from swift_ft.recovery import events as ev
from swift_ft.recovery.checkpoint import Checkpointer, CheckpointFolder, TrainingState
from swift_ft.recovery.claim import claim_store
from swift_ft.recovery.coordinator import Coordinator
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Plan, Task, Way
from swift_ft.recovery.protocol import State
from swift_ft.recovery.replay import LoggedTraffic
from swift_ft.recovery.rollback import Rollback
from swift_ft.recovery.worker_log import WorkerLog, sent_tensor
from swift_ft.testing.faults import Point, parse_faults
from swift_ft.testing.injector import Injector

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
        log_budget_bytes: messages that may wait to be written.

    Attributes:
        iteration: iterations that the state has completed.
        replaying: the state is being rebuilt from the log.
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
        log_budget_bytes: int,
    ) -> None:
        self.iteration = 0
        self._context = context
        self._store = store
        self._state = state
        self._checkpoint_every = checkpoint_every
        self._seed = seed
        self._folder = CheckpointFolder(store)
        self._checkpointer = Checkpointer(self._folder, state, self._part_written)
        self._rollback = Rollback(state)
        self._log = WorkerLog(store, context, budget_bytes=log_budget_bytes)
        self._has_state = False
        self._dirty: str | None = None
        self._replay_until = 0
        self._replayed = 0
        self._hook: PipelineHook | None = None
        self._coordinator = Coordinator(
            context,
            self._folder,
            keep_checkpoints=keep_checkpoints,
            before_commit=lambda iteration: self._injector.at(Point.COMMIT, iteration),
            on_committed=self._log.drop_before,
        )
        self._injector = Injector(
            parse_faults(context.inject),
            rank=context.rank,
            slot=context.slot,
            agent_pid=context.agent_pid,
            announce=self._coordinator.announce_fault,
            break_connections=self._coordinator.group.abort,
        )
        self._traffic = LoggedTraffic(context.rank, context.workers, seed, self._computing)
        for optimizer in state.optimizers.values():
            optimizer.register_step_post_hook(self._updating)

    def attach_pipeline(self, schedule: Any) -> None:
        """See :meth:`swift_ft.Session.attach_pipeline`."""
        self._hook = PipelineHook(schedule, self._traffic, self._publish_metadata)

    @property
    def hook(self) -> PipelineHook:
        """The attached pipeline."""
        assert self._hook is not None
        return self._hook

    @property
    def replaying(self) -> bool:
        """Whether the next step is served from the log."""
        return self._traffic.source is not None

    # ------------------------------------------------------------------------------------- iterations

    def start(self) -> None:
        """Become part of the job, with or without others that are already at work."""
        context, hook = self._context, self.hook
        self._store.probe()
        topology = {"machines": context.world // context.workers, "workers": context.workers}
        checkpoint = claim_store(
            self._store,
            context,
            self._coordinator.rendezvous,
            {**topology, "stages": hook.num_stages},
            context.timeouts.report_s,
        )
        if checkpoint is not None:
            self._coordinator.tell(ev.Committed(checkpoint, 0))
        self.recover()

    def ready_to_step(self) -> None:
        """Make sure that the next step makes sense: recover first, if a loss is already known."""
        coordinator = self._coordinator
        state = coordinator.state
        if self.replaying:
            if coordinator.order(state) != WorkerOrder.EXECUTE or state.generation != self._log.generation:
                self.recover()
        elif coordinator.disturbed(state):
            self.recover()

    def begin(self) -> None:
        """The step of the current iteration begins."""
        self._rollback.begin()
        self._traffic.iteration = self.iteration
        seed_torch(derive_seed(self._seed, self.iteration, -1))
        mode = "replay" if self.replaying else "live"
        if self.replaying:
            self._injector.at(Point.REPLAY, self.iteration)
        self._coordinator.tell_progress(self.iteration, mode, until=self._replay_until)

    def complete(self) -> None:
        """The step of the current iteration is done."""
        self.iteration += 1
        if self.iteration % self._checkpoint_every == 0:
            assert self._log.writer is not None
            self._log.writer.cut()
            self._save(self._coordinator.state)
        if self.replaying:
            self._replayed += 1
            if self.iteration == self._replay_until:
                self._end_replay()
        else:
            self._injector.at(Point.BETWEEN, self.iteration - 1)

    def interrupted(self, cause: str, failure: RecoveryError | None) -> None:
        """The step was interrupted by a broken connection, or its replay turned out impossible."""
        self._dirty = self._rollback.dirty()
        generation = self._log.generation
        if self.replaying and failure is None:
            failure = RecoveryError(
                "the body of the step communicates outside of the pipeline, "
                f"which a replay cannot do ({cause})"
            )
        self.hook.reset()
        self._rollback.back()
        coordinator = self._coordinator
        if failure is not None:
            coordinator.tell(ev.CannotReplay(self._context.rank, generation, str(failure)))
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
        coordinator.tell_progress(self.iteration, "finished", bytes_logged=self.bytes_logged)
        coordinator.tell(ev.Finished(self._context.rank, state.generation))
        state = coordinator.wait_for_finish()
        if coordinator.disturbed(state):
            self.recover()
            return False
        if self.iteration % self._checkpoint_every == 0:
            self._checkpointer.wait(self._context.timeouts.flush_s)
            coordinator.wait_for_commit(self.iteration, self._context.timeouts.flush_s)
        coordinator.settle(self._context.timeouts.flush_s)
        return True

    # --------------------------------------------------------------------------------------- recovery

    def recover(self) -> None:
        """Do as ordered until there is a step to run: live, or in a replay."""
        coordinator = self._coordinator
        coordinator.leave_generation()
        while True:
            order, state = coordinator.next_order()
            if order == WorkerOrder.REPORT:
                self._report(state)
            elif order == WorkerOrder.EXECUTE:
                try:
                    if self._execute(state):
                        return
                except RecoveryError as error:
                    self._cannot(state, error)
            elif order == WorkerOrder.RUN:
                try:
                    if self._go_live(state):
                        return
                except RecoveryError as error:
                    coordinator.leave_group()
                    self._cannot(state, error)

    def _cannot(self, state: State, error: RecoveryError) -> None:
        self._traffic.source = None
        self._coordinator.tell(ev.CannotReplay(self._context.rank, state.generation, str(error)))

    def _report(self, state: State) -> None:
        """Flush the log, then say where the state stands."""
        live = self._has_state and not self.replaying
        self._log.close()
        self._traffic.log = self._traffic.source = None
        known = self.hook.initialised or self._published_metadata() is not None
        self._coordinator.tell_progress(self.iteration, "waiting")
        self._coordinator.tell(
            ev.Reported(
                self._context.rank,
                state.generation,
                self.iteration if self._has_state else None,
                live=live,
                stages=self.hook.stage_indices,
                pipeline_known=known,
                dirty=self._dirty,
            )
        )

    def _execute(self, state: State) -> bool:
        """Do this worker's task. True when a replay begins: its steps run in the user's own loop."""
        assert state.plan is not None
        task = state.plan.tasks[self._context.rank]
        if task.load is not None:
            self._injector.at(Point.LOAD, task.load)
            self._coordinator.tell_progress(self.iteration, "loading")
            self._checkpointer.load(task.load, self._context.rank)
        self.iteration, self._dirty = task.begin, None
        self._traffic.log = self._log.open(state.generation, since=state.log_since)
        if task.begin < task.replay_until:
            self._begin_replay(state, task)
            return True
        self._has_state = True
        self._ready(state.generation)
        return False

    def _begin_replay(self, state: State, task: Task) -> None:
        """Serve the next steps from the neighbours' logs."""
        metadata = self._published_metadata()
        if metadata is None:
            raise RecoveryError("the shapes of this stage's messages were never published")
        if not self.hook.initialised:
            self.hook.adopt_metadata(metadata)
        here = set(self.hook.stage_indices)
        near = {s + step for s in here for step in (-1, +1)} - here
        ranks = sorted({rank for stage, rank in self.hook.holders().items() if stage in near})
        source = self._log.read(ranks, since=state.log_since, iteration=task.begin)
        self._coordinator.group.give_up_soon()  # a replay talks to nobody
        self._traffic.source, self._replay_until, self._replayed = source, task.replay_until, 0
        self._has_state = True

    def _end_replay(self) -> None:
        """The state stands at the consensus iteration: go live with the others."""
        self._log.flush()
        self._traffic.source = None
        self._ready(self._log.generation)
        self.recover()

    def _ready(self, generation: int) -> None:
        self._coordinator.tell(ev.Ready(self._context.rank, generation, self._replayed))
        self._replayed = 0

    def _go_live(self, state: State) -> bool:
        """Form the group; serve the interrupted iteration if this worker has completed it already."""
        assert state.plan is not None
        if self._hook is not None and state.plan.warm_up:
            self.hook.forget_metadata()
        elif not self.hook.initialised and (metadata := self._published_metadata()) is not None:
            self.hook.adopt_metadata(metadata)
        self._traffic.log = self._log.open(state.generation, since=state.log_since)
        self._has_state = True
        if not self._coordinator.enter_group(state.generation):
            return False
        if state.plan.tasks[self._context.rank].serve:
            return self._serve(state, state.plan)
        if state.committed is None and state.plan.way == Way.START:
            self._save(state)  # so that there is always a checkpoint to return to
        return True

    def _serve(self, state: State, plan: Plan) -> bool:
        """One iteration ahead: take part in the interrupted one from this worker's own log."""
        own = self._log.read([self._context.rank], since=state.log_since, iteration=plan.resume)

        def live(rank: int) -> bool:
            return not plan.tasks[rank].serve

        self._traffic.iteration = plan.resume
        self._traffic.expected = own.receipt
        cause = None
        try:
            self.hook.serve(lambda key: sent_tensor(own, key), live)
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
        finally:
            self._traffic.expected = None
        if cause is not None:  # outside of the except block: its traceback holds on to the group
            self._coordinator.lose_touch(cause)
        return cause is None

    # ---------------------------------------------------------------------------- logs and checkpoints

    @property
    def bytes_logged(self) -> int:
        """Payload that this worker has logged."""
        return self._log.bytes_logged

    def _save(self, state: State) -> None:
        """Begin to save the state, unless that checkpoint is committed already."""
        if state.committed is not None and self.iteration <= state.committed:
            return
        rank, iteration, epoch = self._context.rank, self.iteration, state.epoch
        path = self._folder.part(iteration, rank, self._log.generation)

        def durable() -> None:
            self._coordinator.tell(ev.Durable(rank, iteration, epoch, path, self._context.launched))

        self._checkpointer.save(iteration, path, durable)

    def _part_written(self, iteration: int) -> None:
        self._injector.at(Point.CHECKPOINT, iteration)

    # ----------------------------------------------------------------------------------------- shapes

    def _publish_metadata(self, metadata: dict[int, dict[str, Any]]) -> None:
        """Before the first message: whoever replaces this worker must know the shapes."""
        for stage, shapes in metadata.items():
            self._coordinator.rendezvous.set(f"stage/{stage}", json.dumps(shapes))

    def _published_metadata(self) -> dict[int, dict[str, Any]] | None:
        rendezvous = self._coordinator.rendezvous
        keys = {stage: f"stage/{stage}" for stage in self.hook.stage_indices}
        if not rendezvous.check(list(keys.values())):
            return None
        return {stage: json.loads(rendezvous.get(key)) for stage, key in keys.items()}

    def _updating(self, *_: Any) -> None:
        if not self.replaying:
            self._injector.at(Point.OPTIMIZER, self.iteration)

    def _computing(self, iteration: int, microbatch: int, direction: Direction) -> None:
        if not self.replaying:
            point = Point.FORWARD if direction == Direction.FORWARD else Point.BACKWARD
            self._injector.at(point, iteration, microbatch)
