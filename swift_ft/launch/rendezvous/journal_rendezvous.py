"""torchelastic's rendezvous interface over the journal: event-driven, with stable slots.

A machine that keeps its slot keeps its ranks; a newcomer fills the slot that a lost machine left.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
)

from swift_ft.config import detection_timings as timings
from swift_ft.config import store_keys
from swift_ft.coordination.block_log import block_log_in
from swift_ft.coordination.compaction import ArchivedPosition, Compactor
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import EventLog, Journal, open_journal
from swift_ft.coordination.kept_keys import KeptKeys
from swift_ft.coordination.key_holding import KeyHolding
from swift_ft.coordination.meeting import Meeting, Met
from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.coordination.relay.lines import Line
from swift_ft.coordination.relay.notes import write_notes
from swift_ft.coordination.relay.outgoing import Outgoing
from swift_ft.coordination.relay.relay import Relay
from swift_ft.coordination.relay.upstream import Upstream
from swift_ft.coordination.restoring import JournalCopy, Restorer, Roster
from swift_ft.coordination.runs import restore_newest
from swift_ft.coordination.store_client import Admit
from swift_ft.errors import UsageError
from swift_ft.launch.rendezvous.bootstrap import Bootstrap
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.heads import FANOUT, levels_of
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import AgentTodo, agent_order
from swift_ft.recovery.snapshot import JournalSnapshot
from swift_ft.torch_adapters.rendezvous_store import PrefixStore, RendezvousStore

_OPENED_S = 5.0
"""For so long the others leave the first event of the journal to the machine with the first ticket."""


class JournalRendezvous(RendezvousHandler):
    """One machine's membership: it joins, gets a slot, and joins again under a new name after a loss.

    Args:
        connect: opens a client of the rendezvous store, which goes on with a store that is admitted.
        name: of this machine, unlike any other; it joins as ``name.0``, and after a loss as ``name.1``.
        address: this host, as the other machines reach it.
        run_id: name of the run.
        opened: the job's shape; the first machine writes it, all others must agree.
        preferred_slot: the slot to ask for.
        on_change: called in the follower's thread at every change of state.
        trace: learns of each change before all others do.
        setup: what this machine must have in common with all others, as it is now.
        domain: this machine's failure domain; empty if it is one of its own.
        identity: a name of this machine's hardware; empty if nothing tells it.
        on_entries: called in the follower's thread with the entries of each block of the journal.
        on_snapshot: called in the follower's thread with a snapshot that stands for entries of the journal.
        compacts: this machine may delete old blocks of the journal, if that is its duty.
        reach: opens a line to the relay of the machine at an address.
        fanout: see :data:`swift_ft.recovery.heads.FANOUT`.
        append_s: how long an event may take to arrive in the journal.
        joins_at_once: :meth:`join` follows, without a wait for anything in the journal.
        silence_s: a machine that says nothing for so long counts as lost.
        store_place: where the store is, for messages.
        agreed: what the launchers have agreed on in the store, by key.

    Attributes:
        relay: through which this machine's workers, and as a head other machines, reach the journal.
        host: the machine on which this one is a guest; empty for a machine of its own.
        store: this machine's client of the rendezvous store.
        bootstrap: where the scripts of this machine's workers meet in ``init_process_group``.
    """

    def __init__(
        self,
        connect: Callable[[Admit], RendezvousStore],
        *,
        name: str,
        address: str,
        run_id: str,
        opened: ev.JobOpened,
        preferred_slot: int | None,
        on_change: Callable[[State, State], None],
        trace: RecoveryTrace,
        setup: Callable[[], tuple[str, ...]],
        domain: str = "",
        host: str = "",
        identity: str = "",
        on_entries: Callable[[Sequence[Entry]], None] | None = None,
        on_snapshot: Callable[[JournalSnapshot], None] | None = None,
        compacts: bool = True,
        reach: Callable[[str], Line] | None = None,
        fanout: int = FANOUT,
        append_s: float = timings.STORE_SILENCE_S,
        joins_at_once: bool = True,
        silence_s: float = 0.0,
        store_place: str = "",
        agreed: Mapping[str, str] | None = None,
    ) -> None:
        kept, copy, outgoing = KeptKeys(), JournalCopy(), Outgoing()
        for key, value in (agreed or {}).items():
            kept.put(key, value)
        restorer = Restorer(
            copy,
            kept,
            partial(self._roster, outgoing),
            gather_s=silence_s,
            place=store_place,
            on_restored=partial(restore_newest, run_id),
        )
        self._state: Callable[[], State] | None = None  # once there is one
        self.store = connect(restorer.admit)
        self.store.on_set = kept.put
        self.bootstrap = Bootstrap(self.store, address)
        self._run_id = run_id
        self._preferred_slot = preferred_slot
        self._setup = setup
        self._domain = domain
        self.host = host
        self._identity = identity
        self._joined_with = setup()
        self._base_name = name
        self._incarnation = 0
        self.machine = f"{self._base_name}.0"
        self.started_in: int | None = None
        by = f"agent {name}"
        in_store = open_journal(lambda: connect(restorer.admit), by=by)
        has_heads = levels_of(opened.machines, fanout) > 0
        meeting = Meeting(self.store, fanout) if has_heads and joins_at_once else None
        self._open(in_store, opened, first=meeting is None or not meeting.ticket)
        # One that comes later finds the job formed, or replaces a machine that was lost before it had.
        self._meeting = meeting if meeting is not None and meeting.ticket < opened.machines else None
        holding = KeyHolding(kept, reach) if reach is not None else None
        upstream = Upstream(
            in_store,
            reach if has_heads else None,
            outgoing,
            fanout=fanout,
            meets=self._meeting is not None,
            copy=copy,
        )
        self.relay = Relay(
            upstream,
            outgoing,
            by=by,
            append_s=append_s,
            fanout=fanout,
            write_notes=lambda notes, slots: write_notes(
                self.store, notes, slots, machines=opened.machines, fanout=fanout
            ),
            kept=kept,
        )

        def on_new_entries(entries: Sequence[Entry]) -> None:
            trace.on_entries(entries)
            if on_entries is not None:
                on_entries(entries)

        def on_new_state(before: State, after: State) -> None:
            trace.on_change(before, after)
            self.relay.look(after, self.machine)
            if holding is not None:
                holding.look(before, after, self.machine)
            on_change(before, after)

        compactor = Compactor(
            lambda: block_log_in(connect(restorer.admit)),
            ArchivedPosition(self.store).read,
            lambda: self.machine,
            ThreadPoolExecutor(1, thread_name_prefix="swift-compaction"),
            on_covered=copy.drop_before,
        )
        self.follower = Follower(
            self.relay,
            on_change=on_new_state,
            on_entries=on_new_entries,
            on_snapshot=on_snapshot,
            on_block=compactor.on_block if compacts else None,
        )
        self._state = lambda: self.follower.state
        self._kept = kept
        self.relay.look(self.follower.state, self.machine)
        trace.start()
        self.follower.start()

    def _open(self, journal: Journal, opened: ev.JobOpened, *, first: bool) -> None:
        """Write the journal's first event, unless it is there. In a large job one machine does so."""
        if journal.is_empty() and (first or journal.is_empty(_OPENED_S)):
            journal.append(replace(opened, setup=self._joined_with))

    def _roster(self, outgoing: Outgoing) -> Roster | None:
        """The machines that may hold the journal; None before this machine knows the run's state."""
        if self._state is None:
            return None
        membership = self._state().membership
        dead = {s.event.machine for s in outgoing.all() if isinstance(s.event, ev.MachineLost)}
        return Roster(self.machine, membership.slots, membership.spares, membership.fenced, dead)

    @property
    def journal(self) -> EventLog:
        """The journal, for this machine's own events."""
        return self.relay

    def store_of_session(self) -> str:
        """The URL of the session's store. Empty before worker 0 has claimed it.

        Raises:
            UsageError: there are credentials in it, and only workers know them.
        """
        key = store_keys.claimed()
        facts = json.loads(self.store.get(key)) if self.store.check([key]) else {}
        if facts.get("secret"):
            raise UsageError(
                f"the URL of {facts['store']} has credentials in it, which only the script knows: put them "
                "where its client looks for them on each machine (a file or a variable)"
            )
        return str(facts.get("store", ""))

    def start_values(self, ranks: Iterable[int]) -> dict[str, str]:
        """Values that scripts of workers had set at first, by key, as far as they have noted them."""
        keys = [key for rank in ranks if self.store.check([key := store_keys.start_values(rank)])]
        return {key: self.store.get(key).decode() for key in keys}

    def serve(self, lines: Iterable[Line]) -> None:
        """Serve lines to the relay, each in a thread, until the other sides close them."""
        for line in lines:
            threading.Thread(
                target=self.relay.serve, args=(line,), name="swift-relay-line", daemon=True
            ).start()

    def join(self, address: str) -> None:
        """Offer this machine; ``address`` is where its sentinel listens."""
        self._joined_with = self._setup()
        if self._meeting is not None:
            met = None
            try:
                met = self._meeting.meet(Met(self.machine, address))
            finally:  # a signal may end this wait, and what follows needs the journal
                self.relay.meet(met)
            self._meeting = None
        self.journal.append(
            ev.MachineJoined(
                machine=self.machine,
                preferred_slot=self._preferred_slot,
                address=address,
                setup=self._joined_with,
                domain=self._domain,
                host=self.host,
                identity=self._identity,
            )
        )

    def stay_out(self, reason: str, *, after_loss: bool) -> None:
        """Say that this machine takes no part, instead of :meth:`join`, or of :meth:`rejoin` after a loss."""
        if after_loss:
            self._take_next_name()
        if self._meeting is not None:  # nobody is met, and the event needs the way to the journal
            self.relay.meet(None)
            self._meeting = None
        self.journal.append(ev.HealthCheckFailed(machine=self.machine, reason=reason))

    def has_changed(self) -> bool:
        """Whether this machine is not what it was when it joined: someone edited the script, for example."""
        return self._setup() != self._joined_with

    def rejoin(self, address: str) -> None:
        """Offer this machine again, under a new name: the old one is fenced."""
        self._take_next_name()
        self.join(address)

    def _take_next_name(self) -> None:
        self._incarnation += 1
        self._kept.put_machine(self.machine)  # it sets them again itself, under its new name
        self.machine = f"{self._base_name}.{self._incarnation}"
        self.started_in = None
        self.relay.look(self.follower.state, self.machine)

    def next_rendezvous(self) -> RendezvousInfo:
        """The place in which this machine is to start its workers now; rank and size count machines.

        Raises:
            RendezvousClosedError: if the job has ended.
            RendezvousStateError: if it is to start none any more: the slot was lost again, or the generation
                is over. The agent's loop does what the journal asks for instead.
        """
        state = self.follower.state
        order = agent_order(state, machine=self.machine, started_in=self.started_in)
        if order.todo == AgentTodo.STOP:
            raise RendezvousClosedError("The job has ended.")
        if order.todo != AgentTodo.LAUNCH or order.slot is None:
            raise RendezvousStateError(f"{self.machine} starts no workers now: {order.todo}.")
        self.started_in = order.generation
        # torchelastic's barriers use it, of which none is left: it needs no connection of its own.
        store = PrefixStore(store_keys.agents(order.generation), self.store.underlying)
        place = self.bootstrap.place(self.machine, order.generation, lambda: self.follower.state)
        return RendezvousInfo(store, order.slot, state.shape.machines, place)

    @property
    def use_agent_store(self) -> bool:
        """The bootstrap store lives outside all workers, so the loss of rank 0 does not lose it."""
        return True

    def get_backend(self) -> str:
        """The name of this rendezvous."""
        return "swift"

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self.follower.state.phase == Phase.ENDED

    def set_closed(self) -> None:
        """End the job."""
        self.journal.append(ev.JobClosed(reason="the rendezvous was closed"))

    def num_nodes_waiting(self) -> int:
        """Always 0: torchelastic restarts workers for waiting machines, and spares must not cause that."""
        return 0

    def shutdown(self) -> bool:
        """Does nothing: only the store's clients are open, and they end with the process."""
        return True
