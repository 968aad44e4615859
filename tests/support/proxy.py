"""A bad network in front of a server: slow, refusing, or silent."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_CHUNK_BYTES = 1 << 14


class BadNetwork:
    """Forwards connections to a port of this host.

    Attributes:
        bytes_per_s: the rate of each direction of each connection; None for no limit.
        busy: how many of the next connections are answered with 503 and closed.
        silent: how many of the next connections are accepted and never answered.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.bytes_per_s: float | None = None
        self.busy = self.silent = 0
        self._held: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Closes the listener and all connections."""
        self._listener.close()
        for one in self._held:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._held.append(client)
            if self.silent:
                self.silent -= 1
            elif self.busy:
                self.busy -= 1
                threading.Thread(target=self._refuse, args=(client,), daemon=True).start()
            else:
                server = socket.create_connection(("127.0.0.1", self._target))
                self._held.append(server)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _refuse(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            client.recv(_CHUNK_BYTES)
            client.sendall(_BUSY)
            client.shutdown(socket.SHUT_RDWR)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                target.sendall(data)
                if self.bytes_per_s is not None:
                    time.sleep(len(data) / self.bytes_per_s)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def bad_network(target: int) -> Iterator[BadNetwork]:
    """A bad network in front of ``target``, a port; closed at the end of the block."""
    network = BadNetwork(target)
    try:
        yield network
    finally:
        network.close()
