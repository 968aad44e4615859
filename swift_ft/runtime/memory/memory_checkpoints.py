"""Memory checkpoints: every few iterations each worker's state goes to the memory of another machine.

    training thread    copy the state ──▶ (next iterations ...)
    background         digest ──▶ send to the holder ──▶ wait until all are held ──▶ drop the older copy

Each worker has two blocks of host memory for its own copies, and two for those of another worker: in one is
the newest complete copy, in the other one the next. A worker that still waits for the verdict about a
copy makes no other one. Training waits for the copy only, and never for another worker.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import DistError

from swift_ft.checkpoint.memory_copy import Block, digest_of, load_block, size_of, write_block
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import RecoveryError, RendezvousLostError, UnsupportedError
from swift_ft.faults.failpoints import Point, hit
from swift_ft.host.memory import available_bytes
from swift_ft.network.peer_server import COPIES, SpoiltError
from swift_ft.recovery.job_state import State
from swift_ft.recovery.memory import CopyPlacement, newest_in_memory
from swift_ft.recovery.plan import RecoveryMode, Task
from swift_ft.runtime.memory.agreement import COMPLETE, SKIPPED, Agreement
from swift_ft.runtime.memory.holder import Held, HeldCopies, fetch_copy, send_copy
from swift_ft.runtime.memory.interval import Interval
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.units import format_bytes

_logger = logging.getLogger(__name__)

_COPIES = 4
"""In the memory of each worker: two of its own state, two of another's."""
_SEND_S = 300.0
"""The longest time that a copy may be on its way. Then all workers go without that one."""
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0
"""Between two looks into the store. A wait that takes long looks less often, since all workers do."""
_LOST = (DistError, RendezvousLostError, RuntimeError)
"""The rendezvous store is gone. The threads that follow the journal learn of that, too."""


@dataclass(frozen=True, slots=True)
class _Send:
    holder: int
    generation: int
    iteration: int
    keep: int | None
    block: Block
    again: bool = False  # it was complete before; its holder was lost
    by_plan: bool = False  # all make it, because training begins with it, and not because it is due


class MemoryCheckpoints:
    """One worker's copies, those that it holds, and the way back to them.

    Args:
        context: the worker's place.
        state: what is copied.
        rendezvous: where workers agree.
        peers: serves the copies.
        interval: after which iterations there is a copy; None for never.
        available: bytes of host memory that are left; None if unknown.
    """

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        rendezvous: RendezvousStore,
        peers: PeerFiles,
        interval: Interval | None,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        self._context = context
        self._state = state
        self._peers = peers
        self._interval = interval
        self._available = available
        self._agreement = Agreement(rendezvous, context.world_size)
        self._held = HeldCopies()
        self._changed = threading.Condition()
        # Guarded by the condition. In ``_own`` are at most two: ``_base``, the newest complete one, and
        # ``_candidate``, about which there is no verdict yet. Without a generation nothing is copied or sent.
        self._own: dict[int, Held | Block] = {}
        self._base: int | None = None
        self._candidate: int | None = None
        self._generation: int | None = None
        self._holder = context.rank  # of this generation: a worker of another machine
        self._due: deque[_Send] = deque()
        self._skipped: deque[tuple[int, int]] = deque()
        self._unused: list[Block] = []
        self._closed = False
        self._largest = 0  # of the own blocks; owner: the training thread
        self._grown = False  # the optimizers have their state, and it was counted; owner: the training thread
        self._warned = False  # that copies stay in their failure domain; owner: the training thread

    @property
    def active(self) -> bool:
        """Whether there are copies at all: the script asks for them, and there is another machine."""
        return self._interval is not None and self._context.world_size > self._context.workers_per_machine

    @property
    def every(self) -> int | None:
        """Iterations between two copies, as far as it is decided; None without copies."""
        return self._interval.now if self._interval is not None and self.active else None

    @property
    def newest(self) -> int | None:
        """Iterations completed by the newest complete copy, as far as this worker knows. From any thread."""
        with self._changed:
            return self._base

    def start(self) -> None:
        """Take copies of another worker from now on, before any worker reports.

        Raises:
            UnsupportedError: no memory is left for the copies.
        """
        if self._interval is None:
            return
        if not self.active:
            _logger.warning(
                "snapshot_every has no effect: the job has one machine, and no other could hold its state.",
                extra={"event": "snapshots_off"},
            )
            return
        self._check_memory(size_of(self._state))
        self._agreement.offer(self._context.rank, self._peers.serve(COPIES, self._held.source))
        threading.Thread(target=self._run, name="swift-snapshots", daemon=True).start()

    # --------------------------------------------------------------------------- in the training thread

    def completed(self, iteration: int) -> None:
        """Copy the state, if it is due after this many iterations.

        Raises:
            UnsupportedError: no memory is left for the copies.
        """
        if self._interval is None or not self.active:
            return
        if not self._grown:  # most optimizers make their state in the first step
            self._check_memory(size_of(self._state))
            self._grown = True
        if self._interval.due(iteration):
            self._take(iteration)

    def _take(self, iteration: int, *, by_plan: bool = False) -> None:
        with self._changed:
            generation = self._generation
            if generation is None or self._closed or iteration in self._own:
                return
            if self._candidate is not None:  # it is not known yet whether all have it: keep it
                self._skipped.append((generation, iteration))
                self._changed.notify_all()
                return
            into = self._unused.pop() if self._unused else None
        began = time.perf_counter()
        if into is None:
            self._check_memory(size_of(self._state))
        block = write_block(self._state, into)
        self._largest = max(self._largest, block.data.numel())
        assert self._interval is not None
        self._interval.copied(time.perf_counter() - began)
        with self._changed:
            self._own[iteration], self._candidate = block, iteration
            send = _Send(self._holder, generation, iteration, self._base, block, by_plan=by_plan)
            self._due.append(send)
            self._changed.notify_all()

    def report(self) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
        """The iterations of its own that this worker keeps, those that it holds, and for which rank.

        Nothing of that changes before :meth:`live`.
        """
        with self._changed:
            self._generation = self._candidate = None
            self._due.clear()
            self._skipped.clear()
            self._changed.notify_all()
            kept = tuple(sorted(self._own))
        return kept, self._held.freeze(), self._held.owner

    def load(self, task: Task) -> None:
        """Make the copy that a plan names the state again.

        Raises:
            RecoveryError: it is gone, or it is not what was copied.
        """
        iteration, holder = task.begin, task.holder
        with self._changed:
            found = self._own.get(iteration)
        if holder != self._context.rank or found is None:
            assert holder is not None
            found = self._fetch(iteration, holder)
        load_block(self._state, self._as_copied(iteration, found))
        with self._changed:
            self._own[iteration] = found

    def copy_of(self, rank: int, iteration: int) -> Block:
        """The copy of a worker's state that is in this one's memory: of its own, or of one that it holds.

        Raises:
            RecoveryError: it is gone, or it is not what was copied.
        """
        if rank == self._context.rank:
            with self._changed:
                own = self._own.get(iteration)
            if own is not None:
                return self._as_copied(iteration, own)
        elif self._held.owner == rank:
            try:
                held = self._held.as_sent(iteration)
            except SpoiltError as error:
                raise RecoveryError(str(error)) from error
            if held is not None:
                return held.block
        raise RecoveryError(f"the copy of worker {rank}'s state at iteration {iteration} is gone")

    def _as_copied(self, iteration: int, found: Held | Block) -> Block:
        block = found.block if isinstance(found, Held) else found
        block.finish()
        if isinstance(found, Held) and digest_of(block) != found.digest:
            with self._changed:
                if self._own.get(iteration) is found:
                    self._own.pop(iteration)
            raise RecoveryError(f"the copy of iteration {iteration} in memory is not what was copied")
        return block

    def _fetch(self, iteration: int, holder: int) -> Held:
        try:
            address = self._agreement.address(holder)
            if address is None:
                raise ConnectionError("it offers no copies")
            return fetch_copy(address, self._context.secret, iteration)
        except OSError as error:
            raise RecoveryError(
                f"the copy of iteration {iteration} cannot be fetched from worker {holder}: {error}"
            ) from error

    def live(self, state: State) -> None:
        """Training continues, in a generation: copy and send from now on.

        What belongs to an abandoned history is dropped. The newest state that all have stays.
        """
        plan, rank = state.plan, self._context.rank
        placement = CopyPlacement.of(state.domains, self._context.workers_per_machine)
        if plan is None or placement is None or self._interval is None:
            return
        self._warn_of(placement)
        common = newest_in_memory(state.round.statuses)
        base = common.iteration if common is not None and common.iteration <= plan.resume else None
        owner = self._held.owner
        self._held.open(state.generation, until=plan.tasks[owner].end if owner is not None else 0)
        with self._changed:
            self._generation, self._base, self._candidate = state.generation, base, None
            self._holder = placement.holders[rank]
            for iteration in [i for i in self._own if i != base]:
                self._reuse(iteration)
            report = state.round.statuses[self._holder]
            mine = self._own.get(base) if base is not None else None
            if base is not None and mine is not None and (report.held_of != rank or base not in report.held):
                block = mine.block if isinstance(mine, Held) else mine
                self._due.append(_Send(self._holder, state.generation, base, base, block, again=True))
            self._changed.notify_all()
        if plan.mode in (RecoveryMode.START, RecoveryMode.FALLBACK):
            self._take(plan.resume, by_plan=True)

    def _warn_of(self, placement: CopyPlacement) -> None:
        """Say once where a loss of a failure domain would lose a state and its copy."""
        if not placement.exposed or self._warned or self._context.rank != 0:
            return
        self._warned = True
        _logger.warning(
            "The memory checkpoints of machines %s stay in their own failure domain, because the others have "
            "too few machines: if it fails as a whole, all return to the checkpoint in the store.",
            ", ".join(map(str, placement.exposed)),
            extra={"event": "copies_in_their_domain", "machines": placement.exposed},
        )

    def close(self) -> None:
        """The job's last iteration is complete, everywhere."""
        with self._changed:
            self._closed, self._generation = True, None
            self._changed.notify_all()
        self._peers.stop(COPIES)

    def _check_memory(self, length: int) -> None:
        left, workers = self._available(), self._context.workers_per_machine
        missing = _COPIES * max(0, length - self._largest) * workers
        if left is not None and missing > left:
            raise UnsupportedError(
                f"snapshot_every needs {format_bytes(_COPIES * length * workers)} of memory on each machine "
                f"(four copies of a state of {format_bytes(length)} for each of {workers} workers), and "
                f"{format_bytes(left)} are left: give the machine more memory, or leave snapshot_every out."
            )

    # ---------------------------------------------------------------------------------- in the background

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._due or self._skipped)
                    if self._closed:
                        return
                    skipped = [*self._skipped]
                    self._skipped.clear()
                    send = self._due.popleft() if self._due else None
                for generation, iteration in skipped:
                    self._agreement.skip(generation, iteration)
                if send is not None:
                    self._send(send)
        except _LOST:
            with self._changed:
                self._closed = True

    def _send(self, send: _Send) -> None:
        hit(Point.COPY, send.iteration)
        computes_here, began_s = not send.block.under_way, time.thread_time()
        send.block.finish()
        copy = Held(send.block, digest_of(send.block))
        with self._changed:
            if self._own.get(send.iteration) is send.block:
                self._own[send.iteration] = copy
        began = time.monotonic()
        sent = self._deliver(send, copy, began + _SEND_S)
        if send.again:
            return
        if sent and self._interval is not None:
            processor_s = time.thread_time() - began_s if computes_here else 0.0
            self._interval.sent(time.monotonic() - began, processor_s)
        if sent:
            self._agreement.held(send.generation, send.iteration)
        elif self._current(send):
            self._agreement.skip(send.generation, send.iteration)
        self._settle(send, began + 2 * _SEND_S)

    def _current(self, send: _Send) -> bool:
        with self._changed:
            return self._generation == send.generation

    def _deliver(self, send: _Send, copy: Held, deadline: float) -> bool:
        """Send a copy. The holder may not have come to this generation yet: it is tried again."""
        failure = "the holder takes none"
        while self._current(send) and time.monotonic() < deadline:
            try:
                address = self._agreement.address(send.holder)
                if address is not None and send_copy(
                    address,
                    self._context.secret,
                    send.iteration,
                    copy,
                    owner=self._context.rank,
                    generation=send.generation,
                    keep=send.keep,
                    go_on=lambda: self._current(send),
                ):
                    return True
            except OSError as error:
                failure = str(error)
            self._agreement.ask_again(send.holder)
            self._pause(send)
        if self._current(send):
            _logger.warning(
                "Worker %d could not send a copy of its state after %d iterations to worker %d: %s",
                self._context.rank,
                send.iteration,
                send.holder,
                failure,
                extra={"event": "copy_not_held", "iteration": send.iteration},
            )
        return False

    def _settle(self, send: _Send, deadline: float) -> None:
        """Wait for the verdict about a copy, and drop the one that is not needed any more."""
        assert self._interval is not None
        began = time.monotonic()
        while self._current(send):
            self._interval.look()
            verdict = self._agreement.verdict(send.generation, send.iteration)
            if not verdict and not send.by_plan and self._interval.never(send.iteration):
                verdict = SKIPPED  # others have learned sooner that it is not due
            if verdict:
                self._follow(send, verdict)
                return
            if time.monotonic() > deadline:
                self._agreement.skip(send.generation, send.iteration)
            self._pause(send, since=began)

    def _follow(self, send: _Send, verdict: str) -> None:
        with self._changed:
            if self._generation != send.generation:
                return
            self._candidate = None
            if verdict != COMPLETE:
                self._reuse(send.iteration)
                return
            older, self._base = self._base, send.iteration
            for iteration in [i for i in self._own if i != send.iteration]:
                self._reuse(iteration)
        if self._context.rank == 0 and older is not None:  # all workers knew that one to be complete
            self._agreement.forget(send.generation, older)

    def _reuse(self, iteration: int) -> None:
        found = self._own.pop(iteration)
        self._unused = [found.block if isinstance(found, Held) else found]

    def _pause(self, send: _Send, *, since: float = math.inf) -> None:
        """Until the next look, or until the generation is over."""
        waited_s = time.monotonic() - since
        pause_s = min(max(_POLL_S, waited_s / 4), _LONGEST_POLL_S)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._generation != send.generation, pause_s)
