"""Connections among the members of one communicator, which an abort ends at any moment.

gloo is unsuited for this: it reports a dead peer at once, and it cannot abort. So the bytes travel over
sockets of our own, one for each pair and direction. A message is sent once its receiver asks for it, as with
large messages of NCCL: two members that both send first wait for each other for ever.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

_NUMBER = 8
"""Bytes of a rank, and of the size of a message."""
_LOOK_MS = 2
"""Between two looks into the store for members that have not come."""

Buffer = memoryview
_Transfer = Generator[int, None, None]
"""Yields what it waits for: ``POLLIN``, ``POLLOUT``, or 0 for what will never come."""


class Aborted(Exception):
    """An abort ended a wait."""


class Interrupt:
    """An abort: set once, seen by all threads that wait."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_set = False

    def set(self) -> None:
        """End all waits."""
        if not self.is_set:
            self.is_set = True
            os.eventfd_write(self._event, 1)

    def wait(self, sockets: Mapping[int, int], timeout_ms: int | None = None) -> list[int]:
        """Wait for sockets.

        Args:
            sockets: what to wait for, by file descriptor.
            timeout_ms: None to wait until one of them, or an abort, comes.

        Returns:
            The file descriptors that are ready.

        Raises:
            Aborted: it is set.
        """
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        for fd, events in sockets.items():
            poll.register(fd, events)
        ready = [fd for fd, _ in poll.poll(timeout_ms)]
        if self.is_set:
            raise Aborted
        return ready

    def __del__(self) -> None:
        os.close(self._event)


class Patience:
    """Ends a wait for members after a time, and no abort does so before.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def wait(self, sockets: Mapping[int, int], timeout_ms: int | None = None) -> list[int]:
        """As that of :class:`Interrupt`.

        Raises:
            TimeoutError: the time is over.
        """
        poll = select.poll()
        for fd, events in sockets.items():
            poll.register(fd, events)
        left_ms = max(0, int((self._until - time.monotonic()) * 1000))
        ready = [fd for fd, _ in poll.poll(left_ms if timeout_ms is None else min(timeout_ms, left_ms))]
        if not ready and time.monotonic() >= self._until:
            raise TimeoutError("NCCL-like communicator: a member did not come in time")
        return ready


class Mesh:
    """The connections of one member to all others. Forming it waits for them.

    Args:
        store: where the members find each other.
        rank: this member.
        size: number of members.
        interrupt: ends all waits but those of the forming.
        patience_s: the longest time that the forming may take.

    Raises:
        TimeoutError: a member did not come in time.
    """

    def __init__(self, store: Any, rank: int, size: int, interrupt: Interrupt, patience_s: float) -> None:
        self._waits: Interrupt | Patience = Patience(patience_s)
        self._others = [other for other in range(size) if other != rank]
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("")  # the kernel chooses an address that needs no file
                listener.listen(size)
                listener.setblocking(False)
                store.set(f"{rank}", listener.getsockname().hex())
                self._connect(store, rank)
                self._accept(listener)
        except BaseException:
            self.close()
            raise
        self._waits = interrupt

    def exchange(
        self, sends: Mapping[int, Sequence[Buffer]], receives: Mapping[int, Sequence[Buffer]]
    ) -> None:
        """Send and receive at once; messages of a pair in their order. A dead peer is waited for, too.

        Args:
            sends: by receiver.
            receives: by sender.

        Raises:
            Aborted: an abort came first.
            ValueError: a peer expects another size.
        """
        transfers = [(self._to[peer], _send(self._to[peer], buffers)) for peer, buffers in sends.items()]
        transfers += [
            (self._from[peer], _receive(self._from[peer], buffers)) for peer, buffers in receives.items()
        ]
        self._run(transfers)

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self._to.values(), *self._from.values()):
            connection.close()

    def _connect(self, store: Any, rank: int) -> None:
        for other in self._others:
            while not store.check([f"{other}"]):
                self._waits.wait({}, _LOOK_MS)
            connection = self._to[other] = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(bytes.fromhex(store.get(f"{other}").decode()))
                connection.sendall(rank.to_bytes(_NUMBER, "little"))
            except OSError:  # it is dead, which nobody says
                self._waits.wait({})
            connection.setblocking(False)

    def _accept(self, listener: socket.socket) -> None:
        while len(self._from) < len(self._others):
            self._waits.wait({listener.fileno(): select.POLLIN})
            connection, _ = listener.accept()
            connection.setblocking(False)
            number = bytearray(_NUMBER)
            self._run([(connection, _read(connection, memoryview(number)))])
            self._from[int.from_bytes(number, "little")] = connection

    def _run(self, transfers: Sequence[tuple[socket.socket, _Transfer]]) -> None:
        waiting = {connection.fileno(): transfer for connection, transfer in transfers}
        ready, events = list(waiting), dict.fromkeys(waiting, 0)
        while True:
            for fd in ready:
                if fd in waiting:
                    try:
                        events[fd] = next(waiting[fd])
                    except StopIteration:
                        del waiting[fd], events[fd]
            if not waiting:
                return
            ready = self._waits.wait({fd: what for fd, what in events.items() if what})


def _send(connection: socket.socket, buffers: Sequence[Buffer]) -> _Transfer:
    for buffer in buffers:
        size = bytearray(_NUMBER)
        yield from _read(connection, memoryview(size))
        expected = int.from_bytes(size, "little")
        if expected != buffer.nbytes:
            raise ValueError(f"a member sends {buffer.nbytes} bytes where another expects {expected}")
        yield from _write(connection, buffer)


def _receive(connection: socket.socket, buffers: Sequence[Buffer]) -> _Transfer:
    for buffer in buffers:
        yield from _write(connection, memoryview(buffer.nbytes.to_bytes(_NUMBER, "little")))
        yield from _read(connection, buffer)


def _write(connection: socket.socket, buffer: Buffer) -> _Transfer:
    done = 0
    while done < buffer.nbytes:
        try:
            done += connection.send(buffer[done:])
        except BlockingIOError:
            yield select.POLLOUT
        except OSError:
            yield from _silence()


def _read(connection: socket.socket, buffer: Buffer) -> _Transfer:
    done = 0
    while done < buffer.nbytes:
        try:
            count = connection.recv_into(buffer[done:])
        except BlockingIOError:
            yield select.POLLIN
            continue
        except OSError:
            count = 0
        if not count:
            yield from _silence()
        done += count


def _silence() -> _Transfer:
    """The peer is dead."""
    while True:
        yield 0
