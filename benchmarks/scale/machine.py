"""One machine without training: an agent's control plane, and one worker's participant.

What decides and what communicates is the project's own: rendezvous, sentinel, journal, follower, participant.
What is missing are processes of workers, and what they do between orders: a worker reports at once, and has
loaded and replayed what it has to as soon as it is told to.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.distributed.elastic.rendezvous import RendezvousStateError

from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.participant import Participant
from swift_ft.coordination.progress import ProgressBoard, ProgressReader
from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.coordination.relay.lines import RELAY, LocalLine, local_pair
from swift_ft.coordination.relay.worker_journal import WorkerJournal
from swift_ft.coordination.store_client import connect
from swift_ft.errors import JobEndedError, RendezvousLostError
from swift_ft.launch.detection.neighbour_watch import Ring
from swift_ft.launch.detection.policy import LostMachine
from swift_ft.launch.detection.sentinel import Sentinel
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.network import JobSecret, Port
from swift_ft.network import connect as reach
from swift_ft.observe.spans import Recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import AgentTodo, WorkerOrder, agent_order

COMMITTED, AT = 400, 447
"""The last checkpoint, and the iteration in which the loss interrupts training."""

SILENCE_S = 60.0
"""Machines here wait for each other's turn on a processor, and no silence is measured: the lost one's
connections end."""

_HOST = "127.0.0.1"
_FORMING_S = 900.0


@dataclass(frozen=True)
class Job:
    """Where the job of a measurement is, and how large it is.

    Attributes:
        store: the rendezvous store.
        run_id: name of the run.
        machines: number of slots; one worker on each machine.
        secret: that all machines hold.
        start_s: how long a worker takes to start after a loss.
    """

    store: StoreAddress
    run_id: str
    machines: int
    secret: JobSecret
    start_s: float = 0.0


def status_of(rank: int, generation: int, *, fresh: bool) -> ev.StatusReported:
    """What the worker of a stage of one long pipeline reports.

    With messages in logs and no replica, a loss takes all phases: the replacement has a task of its own.

    Args:
        rank: the worker.
        generation: that asks.
        fresh: the worker was started since the last plan and has no state.
    """
    return ev.StatusReported(
        rank=rank,
        generation=generation,
        iteration=None if fresh else AT,
        live=not fresh,
        stages=(rank,),
        pipeline_known=not fresh,
        holds=(f"stage {rank}",),
        can_resend=not fresh,
        group=rank,
        steps=10_000,
    )


def _no_trace() -> RecoveryTrace:
    """Many machines share this process, and its recorder is of one."""
    return RecoveryTrace("", lambda recording, generation: None, until_live=True, own=Recorder())


class Machine:
    """The control plane of one machine, in threads of this process. It has to be started.

    Args:
        job: where to join.
        index: the slot to ask for; None for a spare.
        went_live: called with ``agent`` or ``worker``, the generation, and when its order to go live came, by
            the clock that all processes of this host share.
    """

    def __init__(self, job: Job, index: int | None, went_live: Callable[[str, int, float], None]) -> None:
        self._job = job
        self._went_live = went_live
        self._changed = threading.Event()
        self._live_in = 0  # owner: the agent's journal thread
        self._config = RunConfig(machine_silence_s=SILENCE_S)
        self._connect = partial(connect, job.store, job.run_id)
        self._known = False  # a journal thread begins before this machine has the rendezvous
        self._rendezvous = JournalRendezvous(
            lambda _admit: self._connect(),
            name=f"m-{uuid.uuid4().hex[:8]}",
            address=_HOST,
            run_id=job.run_id,
            opened=ev.JobOpened(machines=job.machines, checkpoint=COMMITTED),
            preferred_slot=index,
            on_change=self._on_change,
            trace=_no_trace(),
            setup=lambda: ("benchmark: control plane",),
            reach=partial(reach, secret=job.secret, purpose=RELAY, timeout_s=SILENCE_S),
            append_s=self._config.rendezvous_timeout_s,
        )
        self._known = True
        self._port = Port(_HOST, job.secret, {RELAY: self._rendezvous.relay.serve})
        self._sentinel = Sentinel(
            silence_s=self._config.machine_silence_s,
            on_lost=self._report_lost,
            port=self._port,
            secret=job.secret,
        )

    def start(self) -> None:
        """Join, and follow orders. Returns at once."""
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    # ------------------------------------------------------------------------------------------ the agent

    def _on_change(self, _before: State, after: State) -> None:
        if after.phase == Phase.LIVE and after.generation != self._live_in:
            self._live_in = after.generation
            if self._known and self._rendezvous.machine in after.membership.slots:
                self._went_live("agent", after.generation, time.monotonic())
        self._changed.set()

    def _run(self) -> None:
        """What an agent does, without processes."""
        self._rendezvous.join(self._port.address)
        self._supervise()

    def _supervise(self) -> None:
        follower = self._rendezvous.follower
        ring = Ring()
        while True:
            state, machine = follower.state, self._rendezvous.machine
            if (watch := ring.news(state, machine)) is not None:
                self._sentinel.watch(watch.machines)
            order = agent_order(state, machine=machine, started_in=self._rendezvous.started_in)
            if order.todo == AgentTodo.STOP:
                return
            if order.todo == AgentTodo.LAUNCH:
                if order.generation == 1:  # where scripts meet in init_process_group is not measured
                    self._rendezvous.started_in, slot = order.generation, order.slot
                else:
                    try:
                        slot = self._rendezvous.next_rendezvous().rank
                    except RendezvousStateError:  # another loss came in between
                        continue
                threading.Thread(target=self._work, args=(slot,), name="worker", daemon=True).start()
            self._changed.wait(self._config.heartbeat_timeout_s / 4)
            self._changed.clear()

    def _report_lost(self, lost: LostMachine) -> None:
        """As the agent does. Called in a thread of the sentinel."""
        state, reporter = self._rendezvous.follower.state, self._rendezvous.machine
        if lost.machine not in state.membership.fenced and state.phase != Phase.ENDED:
            self._rendezvous.journal.append(
                ev.MachineLost(
                    machine=lost.machine, reason=lost.reason, reporter=reporter, silent=lost.silent
                )
            )

    # ----------------------------------------------------------------------------------------- the worker

    def _work(self, rank: int) -> None:
        """Follow orders as the runtime does, with nothing to compute."""
        started_in = self._rendezvous.started_in
        assert started_in is not None
        if started_in > 1:
            time.sleep(self._job.start_s)
        context = WorkerContext(
            run_id=self._job.run_id,
            store=self._job.store,
            machine=self._rendezvous.machine,
            address=_HOST,
            agent_pid=0,
            rank=rank,
            world_size=self._job.machines,
            workers_per_machine=1,
            started_in=started_in,
            secret=self._job.secret,
            config=self._config,
        )
        mine, agents = local_pair()
        self._rendezvous.serve([LocalLine(agents)])
        by = f"worker {rank}"
        journal = WorkerJournal(
            LocalLine(mine),
            lambda: open_journal(self._connect, by=by),
            by=by,
            append_s=self._config.rendezvous_timeout_s,
            on_agent_lost=lambda: None,
        )
        progress = ProgressBoard(None, ProgressReader(self._rendezvous.store), rank)
        participant = Participant(context, journal, progress, _no_trace())
        participant.start()
        try:
            while True:
                self._obey(participant)
        except (JobEndedError, RendezvousLostError):
            return  # the measurement is over

    def _obey(self, participant: Participant) -> None:
        context = participant.context
        order, state = participant.next_order()
        generation = state.generation
        match order:
            case WorkerOrder.REPORT:
                fresh = context.started_in >= state.round.asked_in
                participant.append(status_of(context.rank, generation, fresh=fresh))
            case WorkerOrder.EXECUTE:
                participant.append(ev.WorkerReady(rank=context.rank, generation=generation))
            case WorkerOrder.RUN:
                participant.active.enter(generation, order)
                self._went_live("worker", generation, time.monotonic())
                while participant.wait_for(participant.generation_over, _FORMING_S) is None:
                    continue
                participant.active.leave()
