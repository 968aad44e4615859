"""Ports of the job's network under test: sockets of strangers, a recording wire, and certificates."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from swift_ft.network import Certificates

DEADLINE_S = 30.0


def stranger(address: str, data: bytes = b"") -> socket.socket:
    """A connection of someone who does not belong to the job, with what he says first."""
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), DEADLINE_S)
    line.sendall(data)
    return line


def is_refused(line: socket.socket) -> bool:
    """Whether the other side ends a connection. It fails on any bytes that it sends instead."""
    with line:
        try:
            got = line.recv(4096)
        except ConnectionError:
            return True
        assert got == b"", f"it sent {got!r}"
        return True


class Wire:
    """Stands between a client and a port: records both directions, and can change what passes.

    Args:
        address: of the port.

    Attributes:
        address: for the client.
        upward: what the client sent, in all connections.
        downward: what the port sent.
        change: applied to what the client sends, piece by piece.
        change_down: applied to what the port sends. One that raises ConnectionError ends the connection.
    """

    def __init__(self, address: str) -> None:
        self.upward, self.downward = bytearray(), bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        self.change_down: Callable[[bytes], bytes] = bytes
        self._to = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_listening()

    def stop_listening(self) -> None:
        """Nobody can connect any more. Connections that are there stay."""
        with contextlib.suppress(OSError):  # it ends a thread that waits in accept(), where it can
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = stranger(self._to)
            except OSError:  # nothing listens there any more
                client.close()
                continue
            server.settimeout(None)
            for source, target, record in (
                (client, server, self.upward),
                (server, client, self.downward),
            ):
                threading.Thread(target=self._pass_on, args=(source, target, record), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        try:
            while data := source.recv(65536):
                record += data
                target.sendall((self.change if record is self.upward else self.change_down)(data))
        except OSError:
            pass  # an end of either side is passed on below
        finally:
            for line in (source, target):
                try:
                    line.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


def new_authority(folder: Path, name: str = "authority") -> Path:
    """A certificate authority of a test's own. Returns its certificate; its key lies beside it."""
    cert = folder / f"{name}.pem"
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-keyout", str(cert.with_suffix(".key")), "-out", str(cert),
    )  # fmt: skip
    return cert


def issue(authority: Path, name: str) -> Certificates:
    """A machine's certificate, which an authority has signed."""
    cert = authority.with_name(f"{name}.pem")
    key, request = cert.with_suffix(".key"), cert.with_suffix(".csr")
    _openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request),
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-in", str(request), "-days", "2", "-CA", str(authority),
        "-CAkey", str(authority.with_suffix(".key")), "-CAcreateserial", "-out", str(cert),
    )  # fmt: skip
    return Certificates(cert=str(cert), key=str(key), ca=str(authority))


def _openssl(*args: str) -> None:
    done = subprocess.run(["openssl", *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that sends every client the same answer and closes; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # that it is closed
            while True:
                with listener.accept()[0] as client:
                    client.recv(1 << 16)
                    client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
