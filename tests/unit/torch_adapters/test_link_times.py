"""What the kernel says of a connection: the network's time, and not that of a receiver that does not read."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from swift_ft.torch_adapters.link_times import LinkTimes, LinkUse
from tests.support.waiting import wait_until

MUCH = bytes(8 << 20)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    address = ("127.0.0.1", 0)
    with socket.create_server(address) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            yield sender, receiver


def read(receiver: socket.socket, size: int) -> None:
    while size > 0 and (piece := receiver.recv(1 << 20)):
        size -= len(piece)


def test_bytes_that_arrive() -> None:
    """Where a busy host's receiver was slower than the network all the time, nothing is said of it."""
    times = LinkTimes()
    uses: list[LinkUse] = []

    def is_measured() -> bool:
        reader = threading.Thread(target=read, args=(receiver, len(MUCH)))
        reader.start()
        sender.sendall(MUCH)
        reader.join()
        uses.extend([use] if (use := times.take()) is not None else [])
        return bool(uses)

    with connected() as (sender, receiver):
        assert times.take() is None
        wait_until(is_measured, "a time in which only the network held bytes up")
    assert uses[0].peer == "127.0.0.1"
    assert 0 < uses[0].busy <= 1
    assert uses[0].bytes_per_s > 1e6


def test_a_receiver_that_does_not_read_is_not_the_network() -> None:
    """Its window is full for most of the time."""
    times = LinkTimes()
    with connected() as (sender, receiver):
        times.take()
        sender.setblocking(False)
        wait_until(lambda: _is_full(sender), "the receiver's window to be full")
        wait_until(lambda: window_s(sender) > 0.4, "some time in which nothing can be sent")
        read(receiver, 1 << 20)
        wait_until(lambda: _is_full(sender), "the receiver's window to be full again")
        use = times.take()
    assert use is None or use.busy < 0.3


def test_little_says_nothing() -> None:
    times = LinkTimes()
    with connected() as (sender, receiver):
        times.take()
        sender.sendall(b"x" * 1000)
        read(receiver, 1000)
        assert times.take() is None


def window_s(sender: socket.socket) -> float:
    """How long the receiver's window has been full."""
    told = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    microseconds: int = struct.unpack_from("=Q", told, 176)[0]
    return microseconds / 1e6


def _is_full(sender: socket.socket) -> bool:
    try:
        sender.send(MUCH)
    except BlockingIOError:
        return True
    return False
