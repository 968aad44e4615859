"""torch's key-value store, with a connection for each thread that uses it.

torch's client holds a lock during each call, also while it waits for a key. If two threads shared a client, a
wait in one would hold up the other one, even if that one was about to end the wait. So a
:class:`RendezvousStore` opens one connection for each thread, and no wait can hold up another thread.

``torch.distributed.Store`` and its subclasses are public, but torch does not export them explicitly, so that
strict mypy refuses the public names. At runtime both are the same classes.

Private parts used (tested on torch 2.11 to 2.14): the module ``torch._C._distributed_c10d``, and the first
two messages of a client to the server.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar, runtime_checkable

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistStoreError

from swift_ft.config import detection_timings as timings
from swift_ft.errors import NotRestoredError, RendezvousLostError
from swift_ft.network.addresses import create_server, listen_address
from swift_ft.observe.waits import waiting
from swift_ft.torch_adapters.connections import (
    connections_to,
    exempt,
    keep_alive,
    keep_socket_alive,
    new_connections,
    tcp_connections,
)

__all__ = [
    "AbortableStore",
    "PrefixStore",
    "RendezvousStore",
    "Store",
    "TCPStore",
    "ask_store",
    "serve_store",
]

_BACKLOG = 2048  # as torch's own server
_TRY_S = 0.1
"""Between two attempts to connect."""
_TRIES = 3
"""A call whose connection ends so often is itself the cause: its value is too large, perhaps."""
_LEAST_S = 0.001
_HELLO, _PING = struct.pack("=BI", 0, 0x3C85F7CE), 13

_Answer = TypeVar("_Answer")


def serve_store(host: str, port: int) -> TCPStore:
    """Serve a store in threads of this process, as long as it is referenced.

    torch's server would listen at all addresses, whatever host it is given, and never let go of a client that
    vanished.

    Args:
        host: where it listens (see :func:`swift_ft.network.addresses.listen_address`).
        port: its port; 0 for a free one.

    Raises:
        OSError, torch.distributed.DistError: it cannot listen there.
    """
    listener = create_server(listen_address(host), port, backlog=_BACKLOG)
    # Without it, a client that vanished keeps its descriptor here for ever.
    keep_socket_alive(listener, timings.STORE_CLIENT_SILENCE_S)
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # it belongs to the server from now on
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)


def ask_store(host: str, port: int, *, connect_s: float, answer_s: float) -> None:
    """Ask whether a store answers, as a client of torch does that begins. That one prints what fails.

    The kernel takes connections also for a store that is frozen.

    Args:
        connect_s: seconds to wait for the connection.
        answer_s: seconds to wait for the answer.

    Raises:
        OSError: none answers.
    """
    nonce = secrets.token_bytes(4)
    with socket.create_connection((host, port), timeout=connect_s) as line:
        line.settimeout(answer_s)
        line.sendall(_HELLO + bytes([_PING]) + nonce)
        with waiting("the rendezvous store to answer", answer_s):
            answer = line.recv(len(nonce), socket.MSG_WAITALL)
        if answer != nonce:
            raise ConnectionError("what listens there is no store of torch")


class RendezvousStore:
    """A client of the rendezvous store, for any number of threads.

    Args:
        connect: opens a connection, or raises :class:`RendezvousLostError` soon.
        patience_s: seconds to try that again and again where a connection has ended, before a call fails. The
            calls themselves are then repeated, too. 0: a call fails at once.

    Attributes:
        patience_s: as given.
        repeats: whether a call whose connection ended is repeated on a new one. Who makes several calls that
            belong together repeats them himself.
        on_set: called with each key that was set here, and its value, or None where it was deleted.
    """

    def __init__(self, connect: Callable[[], Store], *, patience_s: float = 0.0) -> None:
        self._connect = connect
        self.patience_s = patience_s
        self.repeats = patience_s > 0
        self.on_set: Callable[[str, str | None], None] = lambda _key, _value: None
        self._timeout: timedelta | None = None
        self._connecting = threading.Lock()
        self._of_thread = threading.local()
        self._of_thread.store = self._patiently(self._lasting)  # its maker learns at once if nothing answers

    def connection(self) -> Store:
        """A new connection that belongs to the caller, and an abort may end it.

        The caller keeps it as long as a process group over it lives: torch keeps a store of ours in C++
        alone, and calls it.
        """
        return self._patiently(self._fleeting)

    def _fleeting(self) -> Store:
        with self._connecting:  # or it counted as one that lasts
            return self._connect()

    def _lasting(self) -> Store:
        """A new connection that no group's abort ends, though it may open while that group forms."""
        with self._connecting:
            before = tcp_connections()
            store = self._connect()
            if isinstance(server := _underlying(store), TCPStore):
                own = dict(new_connections(before).items() & connections_to(server.port).items())
                exempt(own)
                if self.patience_s:  # what fails is tried again on another connection
                    keep_alive(own, min(timings.STORE_CONNECTION_SILENCE_S, self.patience_s))
        return store

    def _patiently(self, connect: Callable[[], Store]) -> Store:
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                return connect()
            except RendezvousLostError as error:
                if isinstance(error, NotRestoredError) or time.monotonic() > deadline:
                    raise
            time.sleep(_TRY_S)

    @property
    def underlying(self) -> Store:
        """The store that this thread's calls reach, without the prefixes of torch."""
        return _underlying(self._own)

    @property
    def connection_number(self) -> int:
        """Of this thread's connection, which is opened if there is none: another one has another number."""
        _ = self._own
        return getattr(self._of_thread, "number", 0)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long calls wait for a key, for all connections opened from now on, and this thread's."""
        self._timeout = timeout
        self._own.set_timeout(timeout)

    @property
    def _own(self) -> Store:
        store: Store | None = getattr(self._of_thread, "store", None)
        if store is None:
            store = self._of_thread.store = self._patiently(self._lasting)
            self._of_thread.number = getattr(self._of_thread, "number", 0) + 1
            if self._timeout is not None:
                store.set_timeout(self._timeout)
        return store

    def _call(
        self, do: Callable[[Store], _Answer], again: Callable[[Store], _Answer] | None = None
    ) -> _Answer:
        """Do something, and on a new connection do it again, if the first one ended meanwhile.

        Args:
            do: may be done twice.
            again: what is done the second time; as the first time if None.
        """
        for _ in range(_TRIES):
            store = self._own
            try:
                return do(store)
            except DistStoreError:  # a key has not come in time
                raise
            except (DistError, RuntimeError):
                if not self.patience_s:
                    raise
                self._of_thread.store = None
                if not self.repeats:
                    raise
            do = again or do
        return do(self._own)

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda store: self._set(store, key, value))
        self.on_set(key, value)

    def _set(self, store: Store, key: str, value: str) -> None:
        store.set(key, value)
        if self.patience_s:
            store.check([key])  # torch's client waits for no answer: a store that is lost took nothing

    def get(self, key: str) -> bytes:
        """The value of a key. Waits for it up to the timeout."""
        return self._call(lambda store: store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, in one exchange."""
        return self._call(lambda store: store.multi_get(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum.

        Where the outcome is unknown, since the connection ended, nothing is added again: a number is rather
        too small than too large.
        """
        return self._call(lambda store: store.add(key, amount), lambda store: store.add(key, 0))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set. Does not wait."""
        return self._call(lambda store: store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys are set."""
        deadline = time.monotonic() + timeout.total_seconds()

        def rest(store: Store) -> None:
            store.wait(list(keys), timedelta(seconds=max(_LEAST_S, deadline - time.monotonic())))

        self._call(lambda store: store.wait(list(keys), timeout), rest)

    def compare_set(self, key: str, expected: str, desired: str, *, keep: bool = True) -> bytes:
        """Set a key if it has the expected value; an empty one stands for a key that is not set.

        Without ``keep`` it is not a key for :attr:`on_set`.
        """

        def in_new_store(store: Store) -> bytes:
            """A store that was restarted may lack the key, which would be expected for ever."""
            return store.compare_set(key, expected if store.check([key]) else "", desired)

        found = self._call(lambda store: store.compare_set(key, expected, desired), in_new_store)
        if keep and found == desired.encode():
            self.on_set(key, desired)
        return found

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        found = self._call(lambda store: store.delete_key(key))
        self.on_set(key, None)
        return found


class KeysInFolder(RendezvousStore):
    """A client whose keys all lie in a folder. The connections are those of another client.

    Args:
        client: the other one.
        folder: returns the key there of a key here.
    """

    def __init__(self, client: RendezvousStore, folder: Callable[[str], str]) -> None:
        self._client = client
        self._folder = folder

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    @property
    def on_set(self) -> Callable[[str, str | None], None]:  # type: ignore[override]  # it is the client's
        """Called with each key that was set here."""
        return lambda key, value: self._client.on_set(self._folder(key), value)

    def set(self, key: str, value: str) -> None:
        self._client.set(self._folder(key), value)

    def get(self, key: str) -> bytes:
        return self._client.get(self._folder(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._client.multi_get([*map(self._folder, keys)])

    def add(self, key: str, amount: int) -> int:
        return self._client.add(self._folder(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check([*map(self._folder, keys)])

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._client.wait([*map(self._folder, keys)], timeout)

    def compare_set(self, key: str, expected: str, desired: str, *, keep: bool = True) -> bytes:
        return self._client.compare_set(self._folder(key), expected, desired, keep=keep)

    def delete_key(self, key: str) -> bool:
        return self._client.delete_key(self._folder(key))


@runtime_checkable
class AbortableStore(Protocol):
    """A store in which a wait can be ended otherwise than by the end of its connection."""

    def abort(self) -> None:
        """End what waits in this store, from any thread."""


def _underlying(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
