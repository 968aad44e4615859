"""The ring of agents: each watches the next one over a TCP connection.

A killed agent's connection ends within milliseconds; a silent one (power, network, SIGSTOP) misses its
heartbeats. An agent that loses its neighbour reports it and then watches the next one. So any number of
failures is found, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from swift_ft.addresses import family_of, listen_address

__all__ = ["Sentinel"]

_BEAT, _BYE = b".", b"!"


class Sentinel:
    """Lets a neighbour watch this agent, and watches another one.

    Args:
        silence_s: a watched machine that sends nothing for so long counts as lost.
        on_lost: called in the sentinel's thread with the machine and the reason.
        host: by which the other agents know this one (see :func:`swift_ft.addresses.listen_address`).
    """

    def __init__(self, *, silence_s: float, on_lost: Callable[[str, str], None], host: str) -> None:
        self._silence_s = silence_s
        self._beat_s = min(0.5, silence_s / 4)
        self._on_lost = on_lost
        address = listen_address(host)
        self._listener = socket.create_server((address, 0), family=family_of(address))
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._wanted: tuple[str, str] | None = None
        self._watching: tuple[str, socket.socket] | None = None
        self._heard = 0.0
        self._watchers: list[socket.socket] = []
        self._wake_r, self._wake_w = os.pipe()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="swift-sentinel", daemon=True)
        self._thread.start()

    def watch(self, machine: str | None, address: str = "") -> None:
        """Watch only this machine from now on; None for no machine."""
        with self._lock:
            self._wanted = (machine, address) if machine else None
        os.write(self._wake_w, b"w")

    def close(self) -> None:
        """Send a goodbye to the agents that watch this one, and stop."""
        self._closing = True
        os.write(self._wake_w, b"c")
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._listener.close()

    def _run(self) -> None:
        next_beat = time.monotonic()
        while not self._closing:
            for key, _ in self._selector.select(max(0.0, next_beat - time.monotonic())):
                self._handle(key.fileobj)
            now = time.monotonic()
            if now >= next_beat:
                if now - next_beat > self._silence_s / 2:
                    self._heard = now  # this process was frozen, not its neighbour
                next_beat = now + self._beat_s
                self._send_to_watchers(_BEAT)
                self._check_silence()
        self._send_to_watchers(_BYE)

    def _handle(self, source: object) -> None:
        if source is self._listener:
            with contextlib.suppress(OSError):
                watcher, _ = self._listener.accept()
                watcher.setblocking(False)
                self._watchers.append(watcher)
        elif source == self._wake_r:
            os.read(self._wake_r, 4096)
            self._retarget()
        else:
            self._listen_to_neighbour()

    def _retarget(self) -> None:
        with self._lock:
            wanted = self._wanted
        if wanted and self._watching and wanted[0] == self._watching[0]:
            return
        self._drop()
        if wanted is None:
            return
        machine, address = wanted
        host, _, port = address.rpartition(":")
        try:
            line = socket.create_connection((host, int(port)), timeout=self._silence_s)
        except OSError as error:
            self._on_lost(machine, f"its agent cannot be reached ({error.strerror or error})")
            return
        line.setblocking(False)
        self._watching = (machine, line)
        self._heard = time.monotonic()
        self._selector.register(line, selectors.EVENT_READ)

    def _listen_to_neighbour(self) -> None:
        if self._watching is None:
            return
        machine, line = self._watching
        try:
            data = line.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data.endswith(_BYE):
            self._drop()
        elif data:
            self._heard = time.monotonic()
        else:
            self._drop()
            self._on_lost(machine, "its agent's connection ended")

    def _check_silence(self) -> None:
        if self._watching and time.monotonic() - self._heard > self._silence_s:
            machine = self._watching[0]
            self._drop()
            self._on_lost(machine, f"its agent was silent for {self._silence_s:g} s")

    def _drop(self) -> None:
        if self._watching:
            self._selector.unregister(self._watching[1])
            self._watching[1].close()
            self._watching = None

    def _send_to_watchers(self, data: bytes) -> None:
        for watcher in list(self._watchers):
            try:
                watcher.send(data)
            except BlockingIOError:
                continue  # its buffer is full, because it does not read
            except OSError:
                self._watchers.remove(watcher)
                watcher.close()
