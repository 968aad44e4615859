"""TCP connections that torch opened: it neither names them nor lets go of them.

Those of a process group are closed underneath gloo, which cannot abort (gloo of torch 2.13).

gloo does not name its connections. Those of a group are the sockets that are open after the group was formed
but were not before, unless they are known to be another's. The kernel's names distinguish a socket from an
earlier one with the same descriptor.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from swift_ft.config import detection_timings as timings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DESCRIPTORS = "/proc/self/fd"

_TCP_RTO_MAX_MS = 44  # Linux 6.15; Python has no name for it
_LONGEST_REPETITION_MS = 2000
"""Between two attempts to send what a silent host has not taken. By default they are up to two minutes apart,
and a network that is there again is noticed so late."""
_LOOK_AGAIN_S = 30.0
"""Between two looks at all descriptors, those among them that were not connections before."""
_exempt: dict[int, str] = {}


def exempt(connections: dict[int, str]) -> None:
    """Never count connections as new: a thread may open its own while another one forms a group."""
    _exempt.update(connections)


def tcp_connections() -> dict[int, str]:
    """Open TCP connections of this process: the kernel's names by file descriptor."""
    return {fd: name for fd, name, *_ in _connections()}


def new_connections(before: dict[int, str]) -> dict[int, str]:
    """The connections that are open now and were not before, but for those that are :func:`exempt`."""
    return dict(tcp_connections().items() - before.items() - _exempt.items())


def connections_to(port: int) -> dict[int, str]:
    """The open connections to a port, whatever the host."""
    return {fd: name for fd, name, (_, its_port, *_), _ in _connections() if its_port == port}


class OpenConnections:
    """The open TCP connections of this process, for who looks at them once a second beside training.

    Of a descriptor that was a connection before, only its name is asked again. One that was something else is
    not looked at for half a minute, though another thread may have opened a connection under its number.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = -math.inf
        # The kernel's name and the other side's address, by descriptor; None for what is no connection.
        self._known: dict[int, tuple[str, str] | None] = {}

    def __iter__(self) -> Iterator[tuple[str, str, socket.socket]]:
        """The kernel's name, the other side's address, and a copy of each one, one by one."""
        if (now := self._clock()) - self._looked_s >= _LOOK_AGAIN_S:
            self._known, self._looked_s = {}, now
        before, self._known = self._known, {}
        for fd in _descriptors():
            known = before.get(fd)
            if fd in before and known is None:
                self._known[fd] = None
                continue
            with contextlib.suppress(OSError):
                if known is None and not _name(fd).startswith("socket:"):
                    self._known[fd] = None
                    continue
                with _copy(fd) as copy:
                    if known is None or known[0] != _name_of(copy):
                        known = None if (peer := _peer(copy)) is None else (_name_of(copy), peer[0])
                    self._known[fd] = known
                    if known is not None:
                        yield *known, copy


def _connections() -> Iterator[tuple[int, str, tuple[Any, ...], socket.socket]]:
    """Descriptor, the kernel's name, the other side and a copy of each open TCP connection, one by one."""
    for fd in _descriptors():
        with contextlib.suppress(OSError):
            if _name(fd).startswith("socket:"):
                with _copy(fd) as copy:
                    if (peer := _peer(copy)) is not None:
                        yield fd, _name_of(copy), peer, copy


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir(_DESCRIPTORS)]  # noqa: PTH208  # a Path costs more than the call


def _peer(opened: socket.socket) -> tuple[Any, ...] | None:
    """The other side; None if it is not a connection over TCP. Raises OSError if there is none yet."""
    if opened.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    peer: tuple[Any, ...] = opened.getpeername()
    return peer


def _copy(fd: int) -> socket.socket:
    """A descriptor of our own: another thread may close `fd` and open something else under its number."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # no socket any more
        os.close(copy)
        raise


def _name(fd: int) -> str:
    return os.readlink(f"{_DESCRIPTORS}/{fd}")  # noqa: PTH115  # as above


def _name_of(opened: socket.socket) -> str:
    """As :func:`_name`, in a fraction of the time."""
    return f"socket:[{os.fstat(opened.fileno()).st_ino}]"


def keep_alive(connections: dict[int, str], silence_s: float) -> None:
    """Let connections fail once the other host has been silent for so long, instead of never.

    A host that loses its power or its network says nothing. A peer that waits for it to speak waits for ever,
    unless the kernel asks it from time to time.
    """
    for fd in connections:
        with contextlib.suppress(OSError), _copy(fd) as copy:
            keep_socket_alive(copy, silence_s)


def keep_socket_alive(opened: socket.socket, silence_s: float) -> None:
    """As :func:`keep_alive`. What a socket that listens accepts has its options."""
    probe_s = max(1, int(silence_s / timings.KEEP_ALIVE_PROBES))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, timings.KEEP_ALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000)),  # if data is under way
    ):
        opened.setsockopt(level, option, value)
    with contextlib.suppress(OSError):  # an older kernel
        opened.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_REPETITION_MS)


def shut_down(connections: dict[int, str]) -> None:
    """End connections, unless they are closed already. What waits for them fails within milliseconds."""
    for fd, name in connections.items():
        with contextlib.suppress(OSError), _copy(fd) as copy:
            if _name_of(copy) == name:
                # For reading only: after a send that fails, gloo no longer knows whom to
                # notify. With both sides shut down, one kill in five left a thread waiting
                # for ever (decision 57).
                copy.shutdown(socket.SHUT_RD)
