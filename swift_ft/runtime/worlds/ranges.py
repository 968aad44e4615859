"""Ranges of tensors that one worker asks another one for: only these bytes travel (Tenplex §4).

    GET /worlds/ranges/[[["models","model","up.weight"],[[0,4],[0,64]]],...]

The answer is the bytes of all these ranges, one after the other, and its ETag is their digest.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote

import torch

from swift_ft.checkpoint.state_payload import StatePath, TensorKind, tensor_at
from swift_ft.errors import DamagedCheckpointError
from swift_ft.network import JobSecret
from swift_ft.network.peer_client import PeerFile
from swift_ft.network.peer_server import WORLDS, Content, Source
from swift_ft.recovery.layout.tensors import Ranges
from swift_ft.storage.digest import Digester

RANGES = "ranges/"
_AT_ONCE = 64
"""Ranges in one request: its line must not become too long."""


def with_ranges(files: Source, saved: Mapping[str, Any]) -> Source:
    """Serve ranges of tensors beside files.

    Args:
        files: what else is served.
        saved: the state, which does not change as long as it is served.
    """

    @contextmanager
    def opened(name: str) -> Iterator[Content]:
        if not name.startswith(RANGES):
            with files.open(name) as content:
                yield content
            return
        try:
            asked = json.loads(unquote(name.removeprefix(RANGES)))
            pieces = [_bytes_of(tensor_at(saved, tuple(path)), ranges) for path, ranges in asked]
        except (ValueError, LookupError, TypeError, AssertionError) as error:
            raise FileNotFoundError(name) from error
        digester = Digester()
        for piece in pieces:
            digester.update(piece)
        digest = digester.digest()
        yield Content(digest.size, digest.digest, _sender(pieces))

    return Source(opened)


def _bytes_of(tensor: torch.Tensor, ranges: Sequence[Sequence[int]]) -> memoryview:
    part = tensor.detach()[tuple(slice(start, end) for start, end in ranges)]
    return part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _sender(pieces: Sequence[memoryview]) -> Callable[[socket.socket, int, int], None]:
    def send(line: socket.socket, first: int, count: int) -> None:
        for piece in pieces:
            wanted = piece[first : first + count]
            line.sendall(wanted)
            first, count = max(0, first - len(piece)), count - len(wanted)

    return send


def fetch_ranges(
    address: str, secret: JobSecret, asked: Sequence[tuple[StatePath, TensorKind, Ranges]]
) -> list[torch.Tensor]:
    """Fetch ranges of tensors from the worker that serves them at an address.

    Args:
        asked: the path of each tensor, what it is there, and the ranges in it.

    Raises:
        OSError: it cannot be reached, or does not have them.
        DamagedCheckpointError: what came is not what was sent.
    """
    rest, found = iter(asked), list[torch.Tensor]()
    while batch := list(islice(rest, _AT_ONCE)):
        names = json.dumps([[path, ranges] for path, _, ranges in batch], separators=(",", ":"))
        file = PeerFile(address, secret, f"{WORLDS}/{RANGES}{quote(names, safe='')}")
        came, digester = bytearray(), Digester()
        for piece in file.pieces():
            came += piece
            digester.update(piece)
        if digester.digest().digest != file.version:
            raise DamagedCheckpointError("ranges of tensors do not match their digest")
        found += _tensors_in(came, batch)
    return found


def _tensors_in(
    came: bytearray, batch: Sequence[tuple[StatePath, TensorKind, Ranges]]
) -> Iterator[torch.Tensor]:
    at = 0
    for _, kind, ranges in batch:
        shape = [end - start for start, end in ranges]
        count = torch.Size(shape).numel()
        tensor = torch.empty(shape, dtype=kind.dtype)
        if count:
            tensor.copy_(torch.frombuffer(came, dtype=kind.dtype, count=count, offset=at).view(shape))
        at += count * kind.dtype.itemsize
        yield tensor
