"""TCP connections are told apart from whatever else opens and closes in the meantime."""

from __future__ import annotations

import gc
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swift_ft.torch_adapters.connections import connections_to, shut_down, tcp_connections

DESCRIPTORS = Path("/proc/self/fd")

LOOKS = 1000


def open_and_close(done: threading.Event) -> None:
    """Let numbers of descriptors pass from TCP connections to other sockets and to pipes, all the time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        while not done.is_set():
            with socket.create_connection(server.getsockname()) as opened:
                server.accept()[0].close()
                opened.shutdown(socket.SHUT_RDWR)
            for end in socket.socketpair():
                end.close()
            for pipe in os.pipe():
                os.close(pipe)


def test_descriptors_may_change_hands_while_connections_are_looked_for() -> None:
    done = threading.Event()
    gc.collect()  # what earlier tests have left open
    before = len([*DESCRIPTORS.iterdir()])
    with ThreadPoolExecutor(4) as others:
        work = [others.submit(open_and_close, done) for _ in range(4)]
        try:
            for _ in range(LOOKS):
                assert connections_to(1) == {}
        finally:
            done.set()
        for one in work:
            one.result()
    gc.collect()
    assert len([*DESCRIPTORS.iterdir()]) <= before  # no copy stays open; threads of earlier tests may end


def test_only_a_connection_that_is_still_the_same_is_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()) as opened, server.accept()[0] as accepted:
            found = connections_to(port)
            assert list(found) == [opened.fileno()]
            assert found.items() <= tcp_connections().items()
            shut_down({opened.fileno(): "socket:[another]"})
            accepted.sendall(b"heard")
            assert opened.recv(5) == b"heard"
            shut_down(found)
            assert opened.recv(5) == b""
