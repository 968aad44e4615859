"""TLS with certificates that the test's own authority signed."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.errors import UsageError
from swift_ft.network import Certificates, Channel, JobSecret, Port, RefusedError, connect
from swift_ft.network.handshake import ClientHandshake, ServerHandshake
from tests.support.strangers import Wire, is_refused, issue, new_authority, stranger
from tests.support.waiting import wait_until

WAIT_S = 30.0
TOKEN = "a token that the members share"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(authority: Path) -> Certificates:
    return issue(authority, "server")


@pytest.fixture(scope="module")
def client(authority: Path) -> Certificates:
    return issue(authority, "client")


def echo(channel: Channel) -> None:
    while (message := channel.receive(WAIT_S)) is not None:
        channel.send(message)
    channel.close()


@pytest.fixture
def served(server: Certificates) -> Iterator[Port]:
    listening = Port("127.0.0.1", JobSecret.of_token(TOKEN, server), {"echo": echo})
    yield listening
    listening.close()


def test_nothing_readable_is_on_the_wire(served: Port, client: Certificates) -> None:
    with Wire(served.address) as wire:
        channel = connect(wire.address, JobSecret.of_token(TOKEN, client), "echo", timeout_s=WAIT_S)
        for message in ({"weights": "confidential"}, {"long": "confidential" * 100_000}):
            channel.send(message)
            assert channel.receive(WAIT_S) == message
        channel.close()
        for record in (wire.upward, wire.downward):
            assert len(record) > 1_000_000
            assert b"confidential" not in record
            assert b"echo" not in record


def test_one_that_reads_late_gets_everything(server: Certificates, client: Certificates) -> None:
    kept: queue.Queue[Channel] = queue.Queue()
    listening = Port("127.0.0.1", JobSecret.of_token(TOKEN, server), {"hold": kept.put})
    channel = connect(listening.address, JobSecret.of_token(TOKEN, client), "hold", timeout_s=WAIT_S)
    sent = 0
    while channel.try_send({"i": sent, "data": "x" * 300_000}):
        sent += 1
    reader = kept.get(timeout=WAIT_S)
    got: list[int] = []
    while len(got) < sent:
        got += [message["i"] for message in reader.drain()]
        if channel._unsent:
            channel.try_send({"i": -1})
    assert [i for i in got if i >= 0] == list(range(sent))
    channel.close()
    listening.close()


@pytest.mark.parametrize("shown", ["none", "of another authority"])
def test_a_certificate_is_needed(
    served: Port, tmp_path: Path, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = issue(new_authority(tmp_path, "another"), "foreign") if shown != "none" else None
    with pytest.raises(RefusedError):
        connect(served.address, JobSecret.of_token(TOKEN, foreign), "echo", timeout_s=WAIT_S)
    wait_until(lambda: len(caplog.records) == 1, "one line is logged")
    assert caplog.records[0].getMessage().count("no TLS with it") == 1


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
@pytest.mark.parametrize("reset", [False, True])
def test_who_ends_in_its_handshake_is_not_called_one_without_tls(
    served: Port, sent: bytes, reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that is killed there: before its first byte, or in its first message."""
    host, _, number = served.address.rpartition(":")
    with socket.create_connection((host, int(number))) as line:
        line.sendall(sent)
        if reset:  # as the kernel of a host that has started again answers
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: len(caplog.records) == 1, "one line is logged")
    assert "it ended the connection" in caplog.records[0].getMessage()


def test_a_port_that_ends_in_the_handshake_is_named_as_such(client: Certificates) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        with pytest.raises(RefusedError, match="ended the connection in the TLS handshake"):
            connect(
                f"127.0.0.1:{listener.getsockname()[1]}",
                JobSecret.of_token(TOKEN, client),
                "echo",
                timeout_s=WAIT_S,
            )
        thread.join()


def test_a_server_of_another_authority_is_refused_by_the_client(client: Certificates, tmp_path: Path) -> None:
    foreign = issue(new_authority(tmp_path, "another"), "foreign")
    listening = Port("127.0.0.1", JobSecret.of_token(TOKEN, foreign), {"echo": echo})
    with pytest.raises(RefusedError, match="no TLS with it"):
        connect(listening.address, JobSecret.of_token(TOKEN, client), "echo", timeout_s=WAIT_S)
    listening.close()


def test_a_certificate_alone_is_not_enough(served: Port, client: Certificates) -> None:
    with pytest.raises(RefusedError, match="the same secret"):
        connect(
            served.address, JobSecret.of_token("another token, as long", client), "echo", timeout_s=WAIT_S
        )


def test_strangers_are_refused_before_tls_too(served: Port) -> None:
    with stranger(served.address, bytes(500)) as line, contextlib.suppress(ConnectionResetError):
        while line.recv(4096):  # TLS may say why, in an alert
            continue


def test_one_in_between_with_another_certificate_is_found_out(
    server: Certificates, client: Certificates
) -> None:
    """Though the same authority signed it: the proofs name the certificate that the client saw."""
    secret = JobSecret.of_token(TOKEN)
    at_client = ClientHandshake(secret, "echo", binding=client.binding())  # shown by the one in between
    at_server = ServerHandshake(secret, binding=server.binding())
    proof = at_client.prove(at_server.challenge(at_client.hello()))
    with pytest.raises(RefusedError):
        at_server.finish(proof)


def test_mistakes_are_named(server: Certificates, client: Certificates, tmp_path: Path) -> None:
    server.check()
    with pytest.raises(UsageError, match=r"--tls-key .* cannot be read"):
        dataclasses.replace(server, key=str(tmp_path / "none")).check()
    with pytest.raises(UsageError, match="do not fit together"):
        dataclasses.replace(server, key=client.key).check()
    another = new_authority(tmp_path, "another")
    for odd in (
        dataclasses.replace(server, ca=str(another)),
        dataclasses.replace(issue(another, "of another"), ca=server.ca),
    ):
        with pytest.raises(
            UsageError, match=r"--tls-cert .* is not accepted .* that an authority in --tls-ca"
        ):
            odd.check()
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for field in ("cert", "key", "ca"):
        with pytest.raises(UsageError, match="PEM"):
            dataclasses.replace(server, **{field: str(bad)}).check()


def test_authorities_are_the_same_in_any_order(server: Certificates, authority: Path, tmp_path: Path) -> None:
    another = new_authority(tmp_path, "another").read_text()
    files = [tmp_path / name for name in ("first", "last", "alone")]
    for file, text in zip(
        files,
        (authority.read_text() + another, f"# a comment\n{another}{authority.read_text()}", another),
        strict=True,
    ):
        file.write_text(text)
    first, last, alone = (dataclasses.replace(server, ca=str(file)).authorities() for file in files)
    assert first == last
    assert len({first, alone, server.authorities()}) == 3


def test_refused_helper_sees_an_end(served: Port) -> None:
    line = stranger(served.address)
    served.close()
    assert is_refused(line)
