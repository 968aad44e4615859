"""An HTTP server that strangers can neither fill nor hold up: connections have a deadline, and are few.

Each connection has a thread of its own. At the limit the oldest one is closed, so that a legitimate client
can still connect.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from swift_ft.network.addresses import family_of
from swift_ft.network.refusals import Refusals


@dataclass(slots=True, eq=False)
class Stranger:
    """A connection that has proved nothing yet, where something can be proved."""

    line: socket.socket
    peer: str
    deadline: float


class BoundedServer(ThreadingHTTPServer, ABC):
    """Answers requests in threads, until it is closed.

    Args:
        address: where it listens; empty for all addresses of this host.
        port: its number; 0 for any free one.
        handler: handles the requests.
        name: the thread's name.
        host: by which other machines know this one, for the log; None for the address.
        most: connections of strangers at once.
        limit_s: how long each of them lasts.

    Attributes:
        poll_s: how often it checks whether it was closed, and who is late.
        refusals: what is said of refused connections.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = True
    poll_s = 0.02

    def __init__(
        self,
        address: str,
        port: int,
        handler: type[BaseHTTPRequestHandler],
        *,
        name: str,
        most: int,
        limit_s: float,
        host: str | None = None,
    ) -> None:
        self.address_family = family_of(address)
        self._most = most
        self._limit_s = limit_s
        self._changing = threading.Lock()  # guards the next one
        self._strangers: dict[int, Stranger] = {}  # by the thread that serves them; the oldest first
        super().__init__((address, port), handler)
        self.refusals = Refusals(f"the server {address if host is None else host}:{self.server_port}")
        threading.Thread(target=self.serve_forever, args=(self.poll_s,), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop serving. Transfers in progress continue, but not those of strangers."""
        self.shutdown()
        self.server_close()
        self._end_strangers(lambda _: True, "the server was closed")
        self.refusals.flush(now=True)

    def server_bind(self) -> None:
        """Bind as TCPServer does. HTTPServer would first look up its own name, which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    # -------------------------------------------------------------------------------------- strangers

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in a thread of its own."""
        stranger = Stranger(request, str(client_address[0]), time.monotonic() + self._limit_s)
        with self._changing:
            self._strangers[threading.get_ident()] = stranger
            crowd = len(self._strangers) - self._most
            oldest = list(self._strangers.values())[:1] if crowd > 0 else []
        self._end_strangers(lambda one: one in oldest, f"more than {self._most} were here at once")
        try:
            self.serve(stranger, client_address)
        finally:
            self.admit()
            stranger.line.close()

    def serve(self, stranger: Stranger, client_address: Any) -> None:
        """Answer the requests of a connection."""
        super().finish_request(stranger.line, client_address)

    def admit(self) -> Stranger | None:
        """The connection of this thread belongs to a member, or has ended. None if that was known."""
        with self._changing:
            return self._strangers.pop(threading.get_ident(), None)

    def service_actions(self) -> None:
        """End those that take too long. Called all the time."""
        now = time.monotonic()
        self._end_strangers(lambda one: one.deadline <= now, f"it took longer than {self._limit_s:g} s")
        self.refusals.flush()

    def _end_strangers(self, which: Any, reason: str) -> None:
        with self._changing:
            ended = {thread: one for thread, one in self._strangers.items() if which(one)}
            for thread in ended:
                del self._strangers[thread]
        for one in ended.values():
            self.refusals.note(one.peer, reason)
            with contextlib.suppress(OSError):  # its thread sees the end, and closes it
                socket.socket.shutdown(one.line, socket.SHUT_RDWR)

    # -------------------------------------------------------------------------------------- failures

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection, which the client sees as well. Any other error is logged."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            self.log_failure(client_address, error)

    @abstractmethod
    def log_failure(self, client_address: object, error: BaseException) -> None:
        """Log that a request could not be answered."""
