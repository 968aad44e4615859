"""One worker's iterations: what happens before, after and instead of the body of the user's loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from swift_ft.checkpoint.store_claim import claim_store
from swift_ft.coordination.agent_channel import agent_channel
from swift_ft.costs.slow_links import LinkSample
from swift_ft.determinism import seed_step
from swift_ft.errors import DivergenceError, RecoveryError, first_line
from swift_ft.faults.failpoints import Point, hit
from swift_ft.observe.spans import FIRST_ITERATION, recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import leaves_after_checkpoint
from swift_ft.runtime.collaborators import Collaborators
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.data.remade import check_remade
from swift_ft.runtime.executor import Executor
from swift_ft.runtime.own_work import OwnWork
from swift_ft.runtime.report import failure_event
from swift_ft.runtime.script.script_phases import Phase
from swift_ft.runtime.slowness.link_meter import LinkMeter
from swift_ft.runtime.slowness.stall_watch import StallWatch
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.comm_errors import is_broken_communication
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_adapters.step_failures import step_failures

__all__ = ["Iterations"]

_logger = logging.getLogger(__name__)


class Iterations:
    """Runs iteration after iteration, and recovers in between.

    Args:
        collaborators: the parts of the worker's runtime.
        executor: carries out orders in a recovery.
        seed: of all random state inside steps.
    """

    def __init__(self, collaborators: Collaborators, executor: Executor, *, seed: int) -> None:
        self._c = collaborators
        self._executor = executor
        self._seed = seed
        self._rank = collaborators.context.rank
        self._stalls = StallWatch(self._rank, threading.get_ident())
        self._links = LinkMeter()
        self._own_work = OwnWork(collaborators)
        self._next: int | None = None  # the iteration that is about to begin, or runs
        self._began = 0  # when the last one began, by the clock of the trace

    @property
    def iteration(self) -> int:
        """Iterations that the state has completed."""
        return self._c.status.iteration

    @property
    def link(self) -> LinkSample | None:
        """What is known of this worker's busiest link. From any thread."""
        return self._links.newest

    @property
    def batches(self) -> BatchCheck:
        """Compares the batches of repeated iterations."""
        return self._c.batches

    @property
    def replaying(self) -> bool:
        """Whether the next step takes its messages from the log, to rebuild the state."""
        return self._c.replaying

    def start(self, store: Store, rendezvous: RendezvousStore, settings: Mapping[str, Any]) -> None:
        """Claim the store and become part of the job, whether or not other workers train already."""
        c, context, pipeline = self._c, self._c.context, self._c.pipeline
        topology: dict[str, Any] = {
            "machines": context.world_size // context.workers_per_machine,
            "workers": context.workers_per_machine,
            "stages": pipeline.num_stages if pipeline is not None else 1,
        }
        if pipeline is not None and pipeline.stack is not None:
            topology["layers"] = pipeline.stack.count
            topology |= {"pipelines": pipeline.stack.pipelines, "redealt": bool(c.dealt)}
        if self._c.shards:
            topology["sharded"] = True
        elif pipeline is None and c.replicas.attached:
            topology["redealt"] = bool(c.dealt)
        found = claim_store(store, context, rendezvous, topology, context.config.report_timeout_s, settings)
        self._c.commits.found(found)
        self._archive_journal(store)
        if pipeline is not None and self._rank == 0 and (reason := pipeline.replay_shards.why_no_helpers):
            _logger.info("parallel recovery is off: %s", reason, extra={"event": "parallel_recovery_off"})
        check_remade(self._c.completeness, rendezvous, self._rank)
        self._c.completeness.watch()
        self._c.device.watch()  # before the rollback, which takes note of updates that begin
        self._c.rollback.watch()
        if pipeline is not None:
            pipeline.put_back_after_trials(self._c.rollback.note_variables)
        recorder.lap()
        self._executor.recover()

    def _archive_journal(self, store: Store) -> None:
        """From now on. What comes after this worker's end is left to its agent."""
        if self._c.archiver is not None:
            self._c.archiver.start()
        if (channel := agent_channel()) is not None:
            channel.send(store=store.child_url(""))

    def ready_to_step(self) -> None:
        """Recover first, if a loss is already known."""
        self._c.between.check()
        participant = self._c.participant
        if self.replaying:
            over = participant.replay_cancelled(self._c.log.asked_in)
        else:
            over = participant.is_cancelled()
        if over:
            self._stalls.pause()
            self._executor.recover()

    def stops_for_layout(self) -> bool:
        """Whether all workers stop before the next iteration, because layers move. If so, recover first."""
        self._next = self.iteration  # before the look at the state: the journal thread looks here after it
        pending = self._c.participant.state.layouts.pending
        if self.replaying or pending is None or pending.iteration != self.iteration:
            return False
        return self._stop_for_layout()

    def _stop_for_layout(self) -> bool:
        """Wait for the others. False if layers do not move after all, and this generation goes on."""
        c = self._c
        self._next = None
        self._stalls.pause()
        self._own_work.forget()
        c.progress.publish(self.iteration, "waiting")
        c.participant.append(
            ev.LayoutBoundaryReached(rank=self._rank, generation=c.log.generation, iteration=self.iteration)
        )
        state = c.participant.wait_for_others()
        if not c.participant.generation_over(state):
            if not state.membership.ended:
                return False
            c.groups.on_connection_broken("the script of another worker has left its loop")
        self._executor.recover()
        return True

    def on_change(self, state: State) -> None:
        """End an iteration that others do not begin, since layers move before it. In the journal thread."""
        pending = state.layouts.pending
        if pending is not None and pending.iteration == self._next and not self.replaying:
            self._c.groups.abort()

    def begin(self) -> None:
        """The step of the current iteration begins."""
        c, iteration = self._c, self.iteration
        c.sharded.begin()  # first of all: others look at the parameters
        if c.context.started_in == 1:  # else an earlier worker was found to be complete
            c.completeness.begin()
        c.batches.begin(iteration, c.participant.state.checkpoints.committed or 0)
        c.log.messages.begin_iteration()
        c.rollback.begin(iteration, replayed=self.replaying)
        c.replicas.begin(iteration)
        if c.pipeline is not None:
            c.pipeline.begin(iteration, c.sharded.number or c.replicas.replica)
        # Workers that may have different data have different random numbers.
        alike = c.pipeline is not None and not c.replicas.attached and not c.sharded
        step_failures.begin()
        c.device.begin()
        seed_step(self._seed, iteration, None if alike else self._rank)
        c.history.begin(c.log.generation, replaying=self.replaying)
        self._began = recorder.now()
        if self.replaying:
            hit(Point.REPLAY, iteration)
        else:
            recorder.lap(FIRST_ITERATION, iteration=iteration)  # the only one in a recording
            self._stalls.begin(iteration)
        until = c.replays.until if c.replays is not None else 0
        own_s, step_s = self._own_work.medians()
        mode, link = "replay" if self.replaying else "live", asdict(self.link) if self.link else None
        c.progress.publish(iteration, mode, until=until, own_s=own_s, step_s=step_s, link=link)

    def is_connection_error(self, error: BaseException) -> bool:
        """Whether an exception in the body of a step comes from broken communication."""
        return is_broken_communication(error, in_backward=self._c.replicas.broken)

    def finish_on_device(self) -> str | None:
        """The body of a step is over. Returns why its communication failed; None if it did not."""
        try:
            self._c.device.finish()
        except RuntimeError as error:
            if not self.is_connection_error(error):
                raise
            return first_line(error)
        return None

    def complete(self) -> None:
        """The step of the current iteration is done."""
        c = self._c
        c.completeness.completed()
        c.rollback.completed()
        c.replicas.completed()
        if c.pipeline is not None:
            c.pipeline.completed()
        self._next = None
        c.status.iteration += 1
        if (channel := agent_channel()) is not None:
            channel.progress(iteration=c.status.iteration, **c.log.heartbeat())
        stats = c.log.messages.end_iteration()
        c.history.complete(self.iteration, stats, replaying=self.replaying)
        self._own_work.complete(stats, replayed=self.replaying)
        if self.replaying:
            recorder.add("replay an iteration", self._began, detail=True, iteration=self.iteration - 1)
            self._complete_replayed()
            return
        if recorder.active:
            c.trace.end(c.log.generation)
        c.groups.destroy_left()
        c.profiler.add(stats, c.pipeline.sent if c.pipeline is not None else None)
        if c.between.due(self.iteration):
            c.status.parts_done = 0  # the rest follows in settle()
        else:
            self._reach_boundary()

    def settle(self) -> bool:
        """Do what the script does between two steps, as far as that is due.

        Returns:
            False if a loss interrupted it: begin again with :meth:`ready_to_step`.
        """
        c, cause = self._c, None
        while c.status.parts_done is not None:
            if c.status.parts_done >= len(c.between.due(self.iteration)):
                c.status.parts_done, c.between.repeats = None, False
                self._reach_boundary()
            elif (cause := self._do_part(c.status.parts_done)) is None:
                c.status.parts_done += 1
            else:
                self._interrupted_between(cause)  # here, when the traceback is gone: it holds on to the group
                return False
        return True

    def _do_part(self, position: int) -> str | None:
        """Returns why it was interrupted; None if it was not."""
        c = self._c
        self._stalls.pause()
        c.progress.publish(self.iteration, "between")
        c.phases.phase = Phase.PART
        if c.pipeline is not None:
            c.pipeline.aside(True)
        try:
            c.between.run(self.iteration, position, c.log.generation, c.phases)
        except Exception as error:
            if not self.is_connection_error(error):
                raise
            return first_line(error)
        finally:
            c.phases.phase = Phase.OVER
            if c.pipeline is not None:
                c.pipeline.aside(False)
        return None

    def _interrupted_between(self, cause: str) -> None:
        c = self._c
        c.between.check()
        c.groups.abort()
        c.replicas.drain()
        c.sharded.reset()
        if c.pipeline is not None:
            c.pipeline.reset()
        c.between.interrupted()
        c.groups.on_connection_broken(cause)
        self._executor.recover()

    def _reach_boundary(self) -> None:
        """All that belongs to the completed iterations is done."""
        c = self._c
        if not self._save_if_due():
            return
        c.snapshots.completed(self.iteration)
        if reason := self._why_checkpoint():
            c.saver.request(self.iteration, c.log.generation, reason)
        self._rebalance()
        hit(Point.BETWEEN, self.iteration - 1)

    def _rebalance(self) -> None:
        """Ask for another layout, or for other shares, if that is due, and this is the worker that asks."""
        c, state = self._c, self._c.participant.state
        rank, generation, stop = self._rank, c.log.generation, self.iteration + ev.REQUESTED_AHEAD
        if c.reshare is not None and (shares := c.reshare.wanted(state, self.iteration)):
            deal = ev.SharesRequested(rank=rank, generation=generation, iteration=stop, shares=shares)
            c.participant.append(deal)  # nothing moves for it, so it comes first
        elif c.rebalance is not None and (layout := c.rebalance.wanted(state, self.iteration)):
            request = ev.LayoutRequested(rank=rank, generation=generation, iteration=stop, layers=layout)
            c.participant.append(request)

    def _save_if_due(self) -> bool:
        """False if the state turned out not to be what a replay has to rebuild."""
        c = self._c
        if not c.saver.due(self.iteration):
            return True
        c.log.roll()
        exact = c.pipeline is None or c.pipeline.shared_replay.exact
        try:
            with c.history.saving(replaying=self.replaying):
                c.saver.save(self.iteration, replaying=self.replaying, exact=exact)
        except DivergenceError as error:
            self._executor.give_up_replay(error)
            return False
        return True

    def _complete_replayed(self) -> None:
        c, replays = self._c, self._c.replays
        assert replays is not None
        due, ends = len(c.between.due(self.iteration)), self.iteration == replays.until
        until = due if replays.parts_from is None or not ends else replays.parts_from
        try:
            c.between.take_over(self.iteration, until)
        except RecoveryError as error:
            self._executor.give_up_replay(error)
            return
        if until < due:
            c.status.parts_done = until  # the checkpoint follows them
        elif not self._save_if_due():
            return
        replays.replayed += 1
        if ends:
            self._executor.end_replay()

    def _why_checkpoint(self) -> str:
        """Why a checkpoint is needed before the regular one; empty if it is not."""
        if self._c.log.nearly_full():
            return "the log nears its budget of disk"
        if leaving := leaves_after_checkpoint(self._c.participant.state):
            return f"{', '.join(leaving)} is asked to leave"
        pipeline, committed = self._c.pipeline, self._c.participant.state.checkpoints.committed
        if pipeline is not None and pipeline.shared_replay.needs_checkpoint(committed):
            return "a stage was rebuilt with other roundings"
        return self._c.log.why_checkpoint(committed)

    def interrupted(self, cause: str, failure: RecoveryError | None, *, caught: bool = False) -> None:
        """The step was interrupted.

        Args:
            cause: the first line of the error of the broken communication.
            failure: why a replay turned out to be impossible, if that is what happened.
            caught: the script has caught the error, and may have updated with gradients of its own.
        """
        c = self._c
        c.between.check()
        self._stalls.pause()
        pending, self._next = c.participant.state.layouts.pending, None
        others_stop = pending is not None and pending.iteration == self.iteration
        if not others_stop:
            recorder.begin()  # the journal may not have the loss yet
        recorder.woke()
        recorder.lap("tear down")
        c.groups.abort()
        c.log.messages.interrupted()
        c.batches.interrupted()
        c.history.interrupted()
        c.replicas.drain()
        c.sharded.reset()
        c.status.dirty = c.rollback.dirty() or c.replicas.updated_again()
        generation = c.log.generation
        if self.replaying and failure is None and not (c.pipeline is not None and c.pipeline.joint):
            failure = RecoveryError(
                "the body of the step communicates outside of the pipeline, "
                f"which a replay cannot do ({cause})"
            )
        if c.pipeline is not None:
            c.pipeline.reset()
        c.rollback.back()
        c.status.updated = c.replicas.updated()  # less those that copies have put back
        if caught:
            c.status.dirty = c.status.dirty or c.replicas.updated_apart()
        if failure is None and others_stop and self._stop_for_layout():
            return
        if failure is not None:
            c.participant.append(failure_event(failure, self._rank, generation, c.checkpointer.unverified))
        else:
            c.groups.on_connection_broken(cause)
        self._executor.recover()

    def finish(self) -> bool:
        """Wait until all workers have completed the last iteration. False if there are more steps to run."""
        c = self._c
        self._stalls.pause()
        state = c.participant.state
        if c.participant.generation_over(state):
            self._executor.recover()
            return False
        if recorder.active:  # there was no iteration left to do
            c.trace.end(state.generation)
        c.log.flush()
        c.history.write()
        c.saver.wait_for_part()
        c.between.check()
        c.progress.publish(self.iteration, "finished", bytes_logged=c.log.bytes_logged)
        c.participant.append(ev.WorkerFinished(rank=self._rank, generation=state.generation))
        state = c.participant.wait_for_finish()
        if c.participant.generation_over(state):
            self._executor.recover()
            return False
        c.completeness.close()
        c.rollback.close()
        c.device.close()
        c.profiler.close(c.context.config.report_timeout_s)
        c.snapshots.close()
        if c.file_peers is not None:
            c.file_peers.close()
        c.saver.finish(self.iteration)
        if c.archiver is not None:
            c.archiver.close()
        c.housekeeping.drain(c.context.config.checkpoint_timeout_s)
        c.log.close()
        self._stalls.close()
        self._links.close()
        return True
