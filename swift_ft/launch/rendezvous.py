"""torchelastic's rendezvous interface over the journal: event-driven, with slots that stay.

A machine that keeps its slot keeps its ranks; a newcomer fills the slot that a lost machine left.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.journal import Follower, Journal
from swift_ft.recovery.orders import AgentTodo, agent_order

__all__ = ["JournalRendezvous"]

_BOOTSTRAP_LOOK = timedelta(seconds=1)
"""How often the wait for a bootstrap store looks whether its generation is over."""


class JournalRendezvous(RendezvousHandler):
    """One machine's membership: joins, learns its slot, joins again under a new name after a loss.

    Args:
        connect: opens a client of the rendezvous store.
        address: this host, as the other machines reach it.
        run_id: name of the run.
        opened: the job's shape; the first machine writes it, all others must agree.
        preferred_slot: the slot to ask for.
        join_s: how long :meth:`next_rendezvous` waits for a slot.
        on_change: told about every change of state, in the follower's thread.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        address: str,
        run_id: str,
        opened: ev.Opened,
        preferred_slot: int | None,
        join_s: float,
        on_change: Callable[[State, State], None],
    ) -> None:
        self._store = connect()
        self._address = address
        self._bootstrap: TCPStore | None = None
        self._run_id = run_id
        self._preferred_slot = preferred_slot
        self._join_s = join_s
        self._base_name = f"m-{uuid.uuid4().hex[:8]}"
        self._incarnation = 0
        self.machine = f"{self._base_name}.0"
        self.launched: int | None = None
        self.journal = Journal(connect, by=f"agent {self._base_name}")
        if not self.journal.has(0):
            self.journal.append(opened)
        self.follower = Follower(self.journal, on_change=on_change)
        self.follower.start()

    def join(self, address: str) -> None:
        """Offer this machine; ``address`` is where its sentinel listens."""
        self.journal.append(ev.Joined(self.machine, self._preferred_slot, address))

    def rejoin(self, address: str) -> None:
        """Offer this machine again, under a new name: the old one is fenced."""
        self._incarnation += 1
        self.machine = f"{self._base_name}.{self._incarnation}"
        self.launched = None
        self.join(address)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this machine's workers have to be started; rank and size count machines.

        Raises:
            RendezvousClosedError: if the job has ended.
            RendezvousTimeoutError: if no slot came free in time.
        """

        def due(state: State) -> bool:
            order = agent_order(state, machine=self.machine, launched=self.launched)
            return order.todo in (AgentTodo.LAUNCH, AgentTodo.STOP)

        state = self.follower.wait_for(due, self._join_s)
        if state is None:
            raise RendezvousTimeoutError(f"No slot for machine {self.machine} within {self._join_s:g} s.")
        order = agent_order(state, machine=self.machine, launched=self.launched)
        if order.todo == AgentTodo.STOP or order.slot is None:
            raise RendezvousClosedError("The job has ended.")
        self.launched = order.generation
        store = PrefixStore(f"agents/{order.generation}", self._store)
        bootstrap = self._bootstrap_store(state, order.slot, order.generation)
        return RendezvousInfo(store, order.slot, state.machines, bootstrap)

    def _bootstrap_store(self, state: State, slot: int, generation: int) -> RendezvousStoreInfo:
        """The store for the script's own ``init_process_group``: a new one for each start of workers.

        torch puts no prefix before its keys there, so workers that are started anew must not meet the
        addresses of dead ones. The lowest slot that starts workers in this generation serves it.

        Raises:
            RendezvousStateError: if the generation is over before the store is there.
        """
        key = f"bootstrap/{generation}"
        while True:
            if slot == min(s for s, launched in enumerate(state.launched) if launched == generation):
                self._bootstrap = TCPStore(self._address, 0, None, True, wait_for_workers=False)
                self._store.set(key, f"{self._address}:{self._bootstrap.port}")
            try:
                self._store.wait([key], _BOOTSTRAP_LOOK)
            except DistError as error:
                state = self.follower.state
                if agent_order(state, machine=self.machine, launched=generation).todo != AgentTodo.WAIT:
                    raise RendezvousStateError(f"Generation {generation} is over.") from error
            else:
                host, _, port = self._store.get(key).decode().rpartition(":")
                return RendezvousStoreInfo(host, int(port))

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store outside of all workers: losing rank 0 loses no bootstrap address."""
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
        self.journal.append(ev.Closed("the rendezvous was closed"))

    def num_nodes_waiting(self) -> int:
        """Spares wait without disturbing anybody, so for torchelastic's question the answer is none."""
        return 0

    def shutdown(self) -> bool:
        """Nothing stays open but the store's clients, which end with the process."""
        return True
