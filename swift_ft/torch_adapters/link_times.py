"""The speed of this worker's links, by the kernel's counters and without the receiver's pauses.

When a message arrives, minus when it was sent, takes two clocks that agree. A probe takes an idle link, and a
process that answers at once. But TCP itself knows, for each connection, how long bytes were on their way
(Linux 4.10 or later, ``TCP_INFO``):

    busy      │ bytes are sent and not yet acknowledged
    - window  │ of that, the receiver takes no more: its process has not asked for them yet
    - buffer  │ of that, this host's buffer is full
    = network │ while so many bytes were acknowledged

Kernels acknowledge, so a process that has no core, or computes, does not count. A receiver may put an
acknowledgement off for 40 ms: so does what is small, and it proves nothing. What goes through no socket (NCCL
over InfiniBand) is not seen.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from dataclasses import dataclass

from swift_ft.torch_adapters.connections import OpenConnections

_ACKED, _NETWORK = struct.Struct("=Q"), struct.Struct("=QQQ")
_ACKED_AT, _NETWORK_AT, _LENGTH = 120, 168, 192
"""``tcpi_bytes_acked``; ``tcpi_busy_time``, ``tcpi_rwnd_limited``, ``tcpi_sndbuf_limited`` (µs)."""
_LEAST_BYTES = 1 << 20
"""Fewer bytes say nothing of how fast a link is."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """The use of a worker's busiest connection in the last seconds.

    Attributes:
        peer: the other host's address.
        busy: share of the time in which bytes were on their way, and only the network held them up.
        bytes_per_s: so many arrived, of that time.
    """

    peer: str
    busy: float
    bytes_per_s: float


class LinkTimes:
    """Reads the connections of this process again and again."""

    def __init__(self) -> None:
        self._connections = OpenConnections()
        self._last: dict[str, tuple[int, int]] = {}
        self._last_s = 0.0

    def take(self) -> LinkUse | None:
        """The busiest connection since the last call; None if none sent much, or the kernel cannot say."""
        now_s, before_s = time.monotonic(), self._last_s
        found, last = dict[str, tuple[int, int]](), self._last
        uses = []
        for name, peer, connection in self._connections:
            if (now := _read(connection)) is None:
                continue
            found[name] = now
            acked, network_us = (a - b for a, b in zip(now, last.get(name, now), strict=True))
            if acked >= _LEAST_BYTES and network_us > 0:
                network_s = network_us / 1e6
                uses.append(LinkUse(peer, network_s / (now_s - before_s), acked / network_s))
        self._last, self._last_s = found, now_s
        return max(uses, key=lambda use: use.busy, default=None)


def _read(connection: socket.socket) -> tuple[int, int] | None:
    """Bytes that have arrived, and microseconds that only the network took for them."""
    if not sys.platform.startswith("linux"):
        return None
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
    if len(told) < _LENGTH:  # an older kernel
        return None
    busy, window, buffer = _NETWORK.unpack_from(told, _NETWORK_AT)
    return _ACKED.unpack_from(told, _ACKED_AT)[0], max(0, busy - window - buffer)
