"""torch's key-value store, with a connection for each thread that uses it.

torch's client holds a lock during each call, also while it waits for a key. If two threads shared a client, a
wait in one would hold up the other one, even if that one was about to end the wait. So a
:class:`RendezvousStore` opens one connection for each thread, and no wait can hold up another thread.

``torch.distributed.Store`` and its subclasses are public, but torch does not export them explicitly, so that
strict mypy refuses the public names. At runtime both are the same classes.

Private parts used (tested on torch 2.13): the module ``torch._C._distributed_c10d``.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, runtime_checkable

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from swift_ft.addresses import family_of, listen_address
from swift_ft.torch_adapters.connections import connections_to, exempt, new_connections, tcp_connections

__all__ = ["AbortableStore", "PrefixStore", "RendezvousStore", "Store", "TCPStore", "serve_store"]

_BACKLOG = 2048  # as torch's own server


def serve_store(host: str, port: int) -> TCPStore:
    """Serve a store in threads of this process, as long as it is referenced.

    torch's server listens at all addresses, whatever host it is given.

    Args:
        host: where it listens (see :func:`swift_ft.addresses.listen_address`).
        port: its port; 0 for a free one.

    Raises:
        OSError, torch.distributed.DistError: it cannot listen there.
    """
    address = listen_address(host)
    if not address:
        return TCPStore(host, port, None, True, wait_for_workers=False)
    listener = socket.create_server((address, port), family=family_of(address), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # it belongs to the server from now on
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)


class RendezvousStore:
    """A client of the rendezvous store, for any number of threads.

    Args:
        connect: opens a connection.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._timeout: timedelta | None = None
        # torch keeps a store of ours in C++ alone, and calls it as long as a group lives.
        self._given: list[Store] = []
        self._connecting = threading.Lock()
        self._of_thread = threading.local()
        self._of_thread.store = self._lasting()  # its maker learns at once if nothing answers

    def connection(self) -> Store:
        """A new connection that belongs to the caller: a process group keeps it, and an abort may end it."""
        with self._connecting:
            store = self._connect()
            self._given.append(store)
        return store

    def _lasting(self) -> Store:
        """A new connection that no group's abort ends, though it may open while that group forms."""
        with self._connecting:
            before = tcp_connections()
            store = self._connect()
            if isinstance(server := _underlying(store), TCPStore):
                exempt(dict(new_connections(before).items() & connections_to(server.port).items()))
        return store

    @property
    def underlying(self) -> Store:
        """What this thread's calls go to, without the prefixes of torch."""
        return _underlying(self._own)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long calls wait for a key, for all connections opened from now on, and this thread's."""
        self._timeout = timeout
        self._own.set_timeout(timeout)

    @property
    def _own(self) -> Store:
        store: Store | None = getattr(self._of_thread, "store", None)
        if store is None:
            store = self._of_thread.store = self._lasting()
            if self._timeout is not None:
                store.set_timeout(self._timeout)
        return store

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._own.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key. Waits for it up to the timeout."""
        return self._own.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, in one exchange."""
        return self._own.multi_get(list(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        return self._own.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set. Does not wait."""
        return self._own.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys are set."""
        self._own.wait(list(keys), timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value; an empty one stands for a key that is not set."""
        return self._own.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._own.delete_key(key)


@runtime_checkable
class AbortableStore(Protocol):
    """A store in which a wait can be ended otherwise than by the end of its connection."""

    def abort(self) -> None:
        """End what waits in this store, from any thread."""


def _underlying(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
