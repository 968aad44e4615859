"""Where servers listen: at the address that others use, and at all only where that is a name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from swift_ft.config.run_config import RunConfig
from swift_ft.network import JobSecret, Port
from swift_ft.network.addresses import endpoint, is_this_host, listen_address, own_address, split_endpoint
from swift_ft.network.page_server import PageServer
from swift_ft.network.peer_server import PeerServer
from swift_ft.torch_adapters.rendezvous_store import TCPStore, serve_store
from tests.support.store_processes import store_process

_LISTENING = "0A"
ALL = {"00000000", "0" * 32}


def listens_at(port: int) -> set[str]:
    """The addresses at which something listens at a port, as the kernel writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTENING and int(number, 16) == port:
                found.add(address)
    return found


@contextmanager
def port(host: str) -> Iterator[int]:
    with closing(Port(host, JobSecret.generated())) as made:
        yield int(made.address.rpartition(":")[2])


@contextmanager
def segments(host: str) -> Iterator[int]:
    with closing(PeerServer(host, JobSecret.generated())) as server:
        yield int(server.address.rpartition(":")[2])


@contextmanager
def service(host: str) -> Iterator[int]:
    with store_process(host) as made:
        yield made.address.port


@contextmanager
def store(host: str) -> Iterator[int]:
    made = serve_store(host, 0)
    client = TCPStore("127.0.0.1", made.port, None, False)
    client.set("key", "value")
    assert made.get("key") == b"value"
    yield made.port


@contextmanager
def pages(host: str) -> Iterator[int]:
    address = RunConfig().metrics_listen_address(host)
    with closing(PageServer(address, 0, {}, name="test-pages")) as server:
        yield server.server_port


@pytest.mark.parametrize("server", [port, segments, service, store, pages])
def test_a_server_listens_at_its_own_address_only(server: object) -> None:
    assert callable(server)
    with server("127.0.0.1") as number:
        assert listens_at(number) == {"0100007F"}
    with server(socket.gethostname()) as number:
        assert listens_at(number) <= ALL
        assert listens_at(number)


@pytest.mark.parametrize(("host", "text"), [("::1", "[::1]:80"), ("10.0.0.1", "10.0.0.1:80"), ("a", "a:80")])
def test_an_endpoint_is_read_as_it_is_written(host: str, text: str) -> None:
    assert endpoint(host, 80) == text
    assert split_endpoint(text) == (host, 80)


def test_a_name_stands_for_addresses_of_both_kinds() -> None:
    with closing(Port("node7.cluster", JobSecret.generated())) as made:
        number = split_endpoint(made.address)[1]
        for loopback in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            socket.create_connection((loopback, number)).close()


def test_others_find_this_host_by_its_address_and_not_by_its_name() -> None:
    """Its name may be known to itself alone. 192.0.2.1 is no host's address: the way there begins here."""
    assert [own_address(host) for host in ("localhost", "127.0.0.1", "::1")] == ["127.0.0.1"] * 2 + ["::1"]
    own = own_address("192.0.2.1")
    assert own == socket.getfqdn() or (is_this_host(own) and own != "192.0.2.1")
    assert own_address("127.0.0.2") == "127.0.0.2"  # as a host whose own name means a loopback address
    assert own_address("nobody.invalid") == socket.getfqdn()


def test_which_hosts_are_this_one() -> None:
    assert all(map(is_this_host, ("localhost", "127.0.0.1", "::1")))
    assert not any(map(is_this_host, ("192.0.2.1", "2001:db8::1", "nobody.invalid")))


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        serve_store("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.2", "127.0.0.2"),
        ("192.0.2.1", ""),  # of no interface of this host: a router translates it
        ("2001:db8::1", ""),
        ("localhost", "127.0.0.1"),
        ("node7.cluster", ""),
        ("0.0.0.0", ""),
        ("::", ""),
    ],
)
def test_an_address_for_each_host(host: str, address: str) -> None:
    assert listen_address(host) == address
