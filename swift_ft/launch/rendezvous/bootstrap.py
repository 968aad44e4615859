"""The store that a script's own ``init_process_group`` uses: a new one for each start of workers.

torch uses no prefix for its keys there, so in an old store restarted workers would read the addresses of dead
ones. The machine with the lowest slot of those that start workers in a generation serves it, in its agent:
the loss of a worker does not lose it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous.api import RendezvousStateError, RendezvousStoreInfo

from swift_ft.config import store_keys
from swift_ft.network.addresses import endpoint, split_endpoint
from swift_ft.observe.waits import waiting
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import AgentTodo, agent_order
from swift_ft.recovery.worlds import Change, World
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore, TCPStore, serve_store

_POLL = timedelta(seconds=1)
"""Interval at which the wait for another machine's store checks whether that machine still is to serve it."""


class Bootstrap:
    """Serves the bootstrap stores of one machine, and finds those of others.

    Args:
        store: where machines tell each other their bootstrap stores' addresses.
        address: this host, as the other machines reach it.

    Attributes:
        server: the machine whose bootstrap store the newest workers of this machine use; empty before.
    """

    def __init__(self, store: RendezvousStore, address: str) -> None:
        self.server = ""
        self._rendezvous = store
        self._address = address
        self._served: TCPStore | None = None  # ends when it is replaced, and with it the older workers' store
        self._ready: TCPStore | None = None
        self._of_next: TCPStore | None = None

    def prepare(self) -> None:
        """Have a store ready: this machine will start workers while all others wait for it."""
        if self._ready is None:
            self._ready = serve_store(self._address, 0)

    def place(self, machine: str, generation: int, state: Callable[[], State]) -> RendezvousStoreInfo:
        """The address of a generation's bootstrap store. Serves it, or waits for the machine that does.

        Args:
            machine: this machine's name.
            generation: in which it starts workers.
            state: the newest state that is known.

        Raises:
            RendezvousStateError: if this machine has lost its slot, or has to start newer workers.
        """
        with waiting(f"the machine that serves the store for init_process_group in generation {generation}"):
            while _starts_workers(now := state(), machine, generation):
                self.server = _server(now, generation)
                key = store_keys.bootstrap(generation, self.server)
                if self.server == machine:
                    # Not read again: an answer that comes late would look like one that never comes.
                    self._served, self._ready = self._ready or serve_store(self._address, 0), None
                    self._rendezvous.set(key, endpoint(self._address, self._served.port))
                    return RendezvousStoreInfo(self._address, self._served.port)
                with suppress(DistStoreError):  # it is not there yet
                    self._rendezvous.wait([key], _POLL)
                    return RendezvousStoreInfo(*split_endpoint(self._rendezvous.get(key).decode()))
        raise RendezvousStateError(f"{machine} starts no workers in generation {generation} any more.")

    def place_of_next(self, machine: str, change: Change) -> tuple[str, int] | None:
        """The address and the port of the next world's bootstrap store. Serves it if this machine is to.

        None if the machine that serves it has not said so yet. Nothing is waited for: the present world's
        workers here train.
        """
        key = store_keys.bootstrap_of_world(change.world.number)
        if change.world.machines[0] == machine:
            self._of_next = self._ready or serve_store(self._address, 0)
            self._ready = None
            self._rendezvous.set(key, endpoint(self._address, self._of_next.port))
            return self._address, self._of_next.port
        if not self._rendezvous.check([key]):
            return None
        return split_endpoint(self._rendezvous.get(key).decode())

    def next_takes_over(self, world: World) -> None:
        """The next world's store is the present one from now on."""
        self.server = world.machines[0]
        self._served, self._of_next = self._of_next, None


def _starts_workers(state: State, machine: str, generation: int) -> bool:
    """Whether nothing has happened since a machine was told to start workers in a generation."""
    order = agent_order(state, machine=machine, started_in=generation)
    return order.todo == AgentTodo.WAIT and order.slot is not None


def _server(state: State, generation: int) -> str:
    """Of the machines that start workers in a generation, the one with the lowest slot."""
    members, started_in = state.membership.members, state.membership.started_in
    return members[min(slot for slot in members if started_in[slot] == generation)]
