"""The iterations in which a worker saves its part of the global checkpoint, or its replica does (paper §3).

All workers save every so many iterations. In between any worker can request a checkpoint, since older logs
can be deleted once one is committed. A worker that learns of the request too late does not save, and that
checkpoint is never committed; the parts of the others are deleted when a later one is.
"""

from __future__ import annotations

import time

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.coordination.participant import Participant
from swift_ft.observe.waits import waiting
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.topology import checkpoint_owner
from swift_ft.runtime.checkpoints.commits import Commits
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.state_proof import StateProof

_POLL_S = 0.1
"""Between two looks whether a machine was lost, while a part is being written."""


class Saver:
    """Saves every so many iterations and on request, and reports each part that is durable.

    Args:
        participant: this worker's part in the job.
        checkpointer: writes and reads the part.
        log: its generation is in the part's name.
        proof: compares the state before its part counts.
        writer: reports parts, and asks for checkpoints, while training goes on.
        every: iterations between two regular checkpoints.
    """

    def __init__(
        self,
        participant: Participant,
        checkpointer: Checkpointer,
        commits: Commits,
        log: WorkerLog,
        proof: StateProof,
        writer: BackgroundWriter,
        *,
        every: int,
    ) -> None:
        self._rank = participant.context.rank
        self._timeout_s = participant.context.config.checkpoint_timeout_s
        self._participant = participant
        self._checkpointer = checkpointer
        self._commits = commits
        self._log = log
        self._proof = proof
        self._writer = writer
        self._asking = False  # a request is on its way to the journal
        self._also_at = participant.context.config.checkpoint_at
        self.every = every

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint follows the completion of this many iterations, regularly or on request."""
        return self.regular(iteration) or iteration == self._participant.state.checkpoints.requested

    def regular(self, iteration: int) -> bool:
        """Whether a checkpoint follows it without any request."""
        return iteration % self.every == 0 or iteration == self._also_at

    def _last_regular(self, iteration: int) -> int:
        """The last one of them, up to an iteration."""
        last = iteration - iteration % self.every
        return max(last, self._also_at) if self._also_at and self._also_at <= iteration else last

    def request(self, iteration: int, generation: int, reason: str) -> None:
        """Request a checkpoint of all workers before the regular one is due.

        To be called between two live steps, after each as long as the need lasts. Nothing is requested while
        a checkpoint, or a request, is on its way. One that came too late, or that a recovery forgot, is
        repeated.

        Args:
            iteration: completed iterations.
            generation: that this worker trains in.
            reason: why, in words.
        """
        state, at = self._participant.state, iteration + ev.REQUESTED_AHEAD
        requested = state.checkpoints.requested
        soon = any(self.regular(i) for i in range(iteration, at + 1))
        pending = requested is not None and iteration <= requested  # a second one would be ignored
        if self._asking or state.phase != Phase.LIVE or soon or pending or not self._checkpointer.wait(0.0):
            return
        self._asking = True
        request = ev.CheckpointRequested(rank=self._rank, iteration=at, generation=generation, reason=reason)
        self._writer.do(lambda: self._ask(request))

    def _ask(self, request: ev.CheckpointRequested) -> None:
        try:
            self._participant.append(request)
        finally:
            self._asking = False

    def save(self, iteration: int, *, replaying: bool = False, exact: bool = True) -> None:
        """Begin to save the state, unless that checkpoint is committed. One replica saves for all.

        Args:
            iteration: completed iterations.
            replaying: the worker is being rebuilt.
            exact: if so, to the bit.

        Raises:
            DivergenceError: if the rebuilt state is not what the lost worker had saved.
        """
        state = self._participant.state
        if state.checkpoints.covers(iteration):
            return
        rank, epoch, generation = self._rank, state.checkpoints.epoch, self._log.generation
        owner = checkpoint_owner(rank, state.round.statuses)
        digests = self._proof.digests()
        self._proof.check(digests, iteration, generation, replaying=replaying, exact=exact)
        path = self._checkpointer.folder.part(iteration, owner, generation)

        def durable(digest: str) -> None:
            """Report it, once the state has been compared: a store that stalls must not hold up a save."""
            part = ev.PartPersisted(
                rank=rank, iteration=iteration, epoch=epoch, generation=generation, path=path, digest=digest
            )
            self._writer.do(lambda: self._report(part))

        if rank == owner:
            self._checkpointer.save(iteration, path, durable, digests)
        else:  # nothing is committed before the owner has reported the same part
            durable("")

    def _report(self, part: ev.PartPersisted) -> None:
        if not self._proof.failed:
            self._participant.post(part)

    def wait_for_part(self) -> None:
        """Wait for a part that is being written, so that its event precedes all that this worker appends."""
        deadline = time.monotonic() + self._timeout_s
        what = "the store to take its part of the last checkpoint"
        with waiting(what, self._timeout_s, flag="--checkpoint-timeout"):
            while time.monotonic() < deadline:
                if self._checkpointer.wait(_POLL_S) and (self._writer.flush(_POLL_S) or self._writer.lost):
                    return
                if self._participant.is_cancelled():
                    return

    def leave(self, iteration: int) -> None:
        """Wait for the commit of the last regular checkpoint, although other workers may still train."""
        self._commits.wait_while_others_save(
            self._last_regular(iteration), self._log.generation, self._timeout_s
        )

    def finish(self, iteration: int) -> None:
        """Wait for the commit of the last checkpoint, once all workers have reported their parts.

        A requested one is not waited for: other workers may have learned of it too late.
        """
        owed = self._participant.state.checkpoints.owed
        self._commits.wait(self._last_regular(iteration) if owed is None else owed, self._timeout_s)
