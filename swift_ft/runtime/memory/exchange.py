"""The client of a copy server: sends a copy to the worker that holds it, and gets one back."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable, Iterator
from http import HTTPStatus
from urllib.parse import urlencode

import torch

from swift_ft.checkpoint.memory_copy import Block
from swift_ft.network import JobSecret
from swift_ft.network.http_access import JobConnection
from swift_ft.network.token_server import READ_TIMEOUT_S
from swift_ft.runtime.memory.holder import DIGEST, Held

_PIECE = 1 << 20


def send_copy(
    address: str,
    secret: JobSecret,
    iteration: int,
    held: Held,
    *,
    owner: int,
    generation: int,
    keep: int | None,
    go_on: Callable[[], bool],
) -> bool:
    """Send a copy. False if the holder is of another generation, or the copy is not needed any more.

    Args:
        secret: the job's.
        held: the copy.
        owner: the worker whose state it is.
        generation: in which it was made.
        keep: the other iteration of which a copy is still needed.
        go_on: asked before each piece.

    Raises:
        OSError: the holder cannot be reached.
    """
    query = {"owner": owner, "generation": generation, "digest": held.digest}
    if keep is not None:
        query["keep"] = keep
    with _connection(address, secret) as connection:
        path = f"/{iteration}?{urlencode(query)}"
        authorization = connection.authorization("PUT", path, held.block.length)
        connection.putrequest("PUT", path)
        connection.putheader("Authorization", authorization)
        connection.putheader("Content-Length", str(held.block.length))
        connection.endheaders()
        view = held.block.view
        try:
            for at in range(0, len(view), _PIECE):
                if not go_on():
                    return False
                connection.send(view[at : at + _PIECE])
        except (BrokenPipeError, ConnectionResetError):  # refused, perhaps: the answer says so
            return False
        with connection.getresponse() as response:
            return response.status == HTTPStatus.OK


def fetch_copy(address: str, secret: JobSecret, iteration: int) -> Held:
    """Get a copy back.

    Raises:
        OSError: the holder cannot be reached, or has no such copy.
    """
    with _connection(address, secret) as connection, connection.get(f"/{iteration}") as response:
        if response.status == HTTPStatus.GONE:
            raise ConnectionError(f"{address} finds that it is not what was sent")
        if response.status != HTTPStatus.OK or response.length is None:
            raise ConnectionError(f"{address} answers {response.status} {response.reason}")
        length, digest = response.length, int(response.headers[DIGEST])
        data = torch.empty(length, dtype=torch.uint8)
        view, at = data.numpy().data, 0
        while at < length:
            read = response.readinto(view[at : at + _PIECE])
            if not read:
                raise ConnectionError(f"{address} broke off after {at} of {length} bytes")
            at += read
        return Held(Block(data, length), digest)


@contextlib.contextmanager
def _connection(address: str, secret: JobSecret) -> Iterator[JobConnection]:
    connection = JobConnection(address, secret, timeout_s=READ_TIMEOUT_S)
    try:
        yield connection
    except http.client.HTTPException as error:
        raise ConnectionError(f"{address}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
