"""Connects to another member's port."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import ExitStack

from swift_ft.network.addresses import split_endpoint
from swift_ft.network.channel import Channel
from swift_ft.network.errors import BadFrameError, RefusedError
from swift_ft.network.frames import FrameBuffer, frame
from swift_ft.network.handshake import MAX_HANDSHAKE_BYTES, UNBOUND, ClientHandshake
from swift_ft.network.secret import JobSecret
from swift_ft.network.tls import binding_of


def connect(address: str, secret: JobSecret, purpose: str, *, timeout_s: float) -> Channel:
    """Connect to the port at ``host:port``, and prove to each other that both belong to the job.

    Args:
        secret: the job's.
        purpose: what the connection is for: one of the port's handlers.
        timeout_s: for all of it.

    Raises:
        RefusedError: the other side does not belong to this job, or says so of this one.
        OSError: it cannot be reached, or does not answer in time (TimeoutError).
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as until_ready:
        line = until_ready.enter_context(socket.create_connection(split_endpoint(address), timeout_s))
        binding = UNBOUND
        if secret.certificates is not None:
            line.settimeout(_left(deadline, address))
            try:
                context = secret.certificates.client_context()
                line = until_ready.enter_context(context.wrap_socket(line))
            except (ssl.SSLEOFError, ConnectionResetError) as error:
                raise RefusedError(
                    f"{address} ended the connection in the TLS handshake: has it ended, or no certificate "
                    "(--tls-cert)?"
                ) from error
            except ssl.SSLError as error:
                raise RefusedError(f"{address}: no TLS with it ({error.reason or error})") from error
            binding = binding_of(line)
        handshake = ClientHandshake(secret, purpose, binding)
        try:
            _send(line, handshake.hello(), deadline, address)
            _send(line, handshake.prove(_receive(line, deadline, address)), deadline, address)
            keys = handshake.finish(_receive(line, deadline, address))
        except (RefusedError, BadFrameError) as error:
            raise RefusedError(f"{address}: {error}") from error
        except TimeoutError:
            raise
        except OSError as error:
            raise RefusedError(
                f"{address} ended the connection: was it started with the same secret?"
            ) from error
        until_ready.pop_all()
        return Channel(line, keys, purpose=purpose, peer=address)


def _send(line: socket.socket, payload: bytes, deadline: float, address: str) -> None:
    line.settimeout(_left(deadline, address))
    line.sendall(frame(payload))


def _receive(line: socket.socket, deadline: float, address: str) -> bytes:
    """The server's next frame. No byte after it is taken: that is the channel's."""
    received = FrameBuffer(MAX_HANDSHAKE_BYTES)
    while (payload := received.next()) is None:
        line.settimeout(_left(deadline, address))
        data = line.recv(received.missing())
        if not data:
            raise ConnectionError(address)
        received.feed(data)
    return payload


def _left(deadline: float, address: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"{address} does not answer in time")
    return left
