"""A client of the rendezvous store: one thread's wait never holds up another thread."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import cast

import pytest

from swift_ft.torch_adapters.connections import connections_to, new_connections, tcp_connections
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore, Store, TCPStore, ask_store, serve_store
from tests.support.waiting import wait_until


def served() -> RendezvousStore:
    """A client of a store that this process serves."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> Store:
        return TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30))

    return RendezvousStore(connect)


def test_a_thread_ends_the_wait_of_another_one() -> None:
    """With one connection for both, the second call would wait for the end of the first one."""
    store = served()
    found: list[bytes] = []
    begun = threading.Event()

    def wait() -> None:
        store.check(["begun"])  # the connection is open
        begun.set()
        found.append(store.get("answer"))

    waiting = threading.Thread(target=wait)
    waiting.start()
    begun.wait(30)
    store.set("answer", "42")
    waiting.join(30)
    assert found == [b"42"]


def test_a_timeout_holds_for_later_threads() -> None:
    store = served()
    store.set_timeout(timedelta(milliseconds=1))
    failed: list[str] = []

    def ask() -> None:
        try:
            store.get("nothing")
        except RuntimeError as error:
            failed.append(str(error))

    other = threading.Thread(target=ask)
    other.start()
    other.join(20)
    assert len(failed) == 1


def test_all_that_the_project_asks_of_a_store() -> None:
    """The conformance of the wrapper: each call reaches torch's store, and its answer comes back."""
    store = served()
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.multi_get(["a", "a"]) == [b"1", b"1"]
    assert store.add("n", 2) == 2
    assert store.add("n", 3) == 5
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.compare_set("b", "", "2") == b"2"
    assert store.compare_set("b", "", "3") == b"2"
    store.wait(["a", "b"], timedelta(seconds=5))
    assert store.delete_key("b")
    assert not store.check(["b"])
    assert store.connection().get("a") == b"1"


def test_an_abort_spares_a_connection_that_a_thread_opened_meanwhile() -> None:
    """The one that a group's own rendezvous uses ends: gloo may wait there for a lost worker's address."""
    store = served()
    port = cast(TCPStore, store.connection()).port
    before = tcp_connections()
    seen: list[int] = []

    def use() -> None:
        store.set("a", "1")
        seen.append(len(connections_to(port).items() & new_connections(before).items()))
        of_a_group = store.connection()
        seen.append(len(connections_to(port).items() & new_connections(before).items()))
        of_a_group.set("b", "2")

    other = threading.Thread(target=use)
    other.start()
    other.join(20)
    assert seen == [0, 1]


@pytest.mark.parametrize("host", ["127.0.0.1", socket.gethostname()])
def test_the_server_lets_go_of_clients_that_vanished(host: str) -> None:
    """Each host that loses its power, or was cut off, leaves connections behind that nothing else ends."""
    server = serve_store(host, 0)
    before = tcp_connections()
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"\0")
    local = client.getsockname()
    accepted = wait_until(lambda: connections_to(local[1]).items() - before.items(), "the server's end")
    ((descriptor, _),) = accepted
    with socket.socket(fileno=os.dup(descriptor)) as end:
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000
    client.close()


def test_a_store_is_asked_before_torch_connects(capfd: pytest.CaptureFixture[str]) -> None:
    """As torch's client does. What does not answer, or not as a store does, is found without a word."""
    store = serve_store("127.0.0.1", 0)
    ask_store("127.0.0.1", store.port, connect_s=5.0, answer_s=5.0)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        port = frozen.getsockname()[1]
        with pytest.raises(TimeoutError):
            ask_store("127.0.0.1", port, connect_s=5.0, answer_s=0.05)
    with pytest.raises(ConnectionRefusedError):
        ask_store("127.0.0.1", port, connect_s=5.0, answer_s=5.0)
    assert capfd.readouterr() == ("", "")


def test_another_server_is_no_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            line, _ = other.accept()
            with line:
                line.recv(100)
                line.sendall(b"????")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="no store of torch"):
            ask_store("127.0.0.1", other.getsockname()[1], connect_s=5.0, answer_s=5.0)
        thread.join(20)
