"""TCP connections are told apart from whatever else opens and closes in the meantime."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift_ft.torch_adapters.connections import OpenConnections, connections_to, shut_down, tcp_connections

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


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        opened = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with opened, accepted:
            yield opened, accepted


def names_in(found: OpenConnections) -> set[str]:
    return {name for name, host, copy in found if host == "127.0.0.1" and copy.fileno() >= 0}


def test_connections_are_found_as_they_come_and_go() -> None:
    found = OpenConnections(clock=lambda: 0.0)
    before = names_in(found)
    assert before == {*tcp_connections().values()}
    with connected():
        first = names_in(found)
        assert len(first - before) == 2
        assert first == {*tcp_connections().values()}, "the kernel's names, as its links say them"
        with connected():
            assert len(names_in(found) - first) == 2
        assert names_in(found) == first
    assert names_in(found) == before


def test_another_connection_under_the_number_of_an_earlier_one() -> None:
    found = OpenConnections(clock=lambda: 0.0)
    with connected() as (one, _), connected() as (other, _):
        before = names_in(found)
        os.dup2(other.fileno(), one.fileno())
        now = names_in(found)
        assert now < before
        assert now == {*tcp_connections().values()}


def test_a_connection_under_the_number_of_a_file_is_found_after_half_a_minute() -> None:
    clock = [0.0]
    found = OpenConnections(clock=lambda: clock[0])
    place = os.open("/dev/null", os.O_RDONLY)
    try:
        before = names_in(found)
        with connected() as (opened, _):
            os.dup2(opened.fileno(), place)
            assert len(names_in(found) - before) == 2
        assert names_in(found) == before
        clock[0] = 30.0
        assert len(names_in(found) - before) == 1
    finally:
        os.close(place)


def test_what_is_known_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, pipes and unix sockets are most of a worker's descriptors."""
    found = OpenConnections(clock=lambda: 0.0)
    copied: list[int] = []
    dup = os.dup

    def counted(fd: int) -> int:
        copied.append(fd)
        return dup(fd)

    def none(fd: int) -> str:
        raise FileNotFoundError(fd)  # as of the descriptor by which the others were listed

    with connected() as (one, other), os.fdopen(os.open("/dev/null", os.O_RDONLY)):
        names, numbers = names_in(found), {one.fileno(), other.fileno()}
        monkeypatch.setattr(os, "dup", counted)
        monkeypatch.setattr("swift_ft.torch_adapters.connections._name", none)
        assert names_in(found) == names
    assert numbers <= {*copied}
    assert len(copied) == len(names)
