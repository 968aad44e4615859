"""The states that one worker offers, and others read: only the bytes that these need travel (Tenplex §4).

    GET /worlds/3/head                    the kind of each tensor of worker 3's state, and the plain bytes
    GET /worlds/3/tensors/0,1,17:4-8:0-64 tensors by their numbers, one after the other; of 17 a range only

Nothing is copied to be offered: what is asked for is sent from where it is. An answer's ETag is its digest,
and the journal has that of the head.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from swift_ft.checkpoint.state_payload import StatePath, StatePayload, TensorKind, kinds_in, tensors_in
from swift_ft.errors import DamagedCheckpointError
from swift_ft.network import JobSecret
from swift_ft.network.peer_client import PeerFile
from swift_ft.network.peer_server import WORLDS, Content, Source
from swift_ft.recovery.layout.tensors import Ranges
from swift_ft.storage.digest import Digester
from swift_ft.torch_core.tensors import tensor_bytes

HEAD, TENSORS = "head", "tensors/"
_MOST_BYTES = 64 << 20
"""Bytes of one answer, unless one range has more: their digest comes first, and the reader waits for it."""
_MOST_RANGES = 1000
"""Ranges in one request: its line must not become too long."""
_JOINED_BYTES = 1 << 16
"""Smaller pieces are sent together."""


class OfferedTensors:
    """A state, as it is served.

    Args:
        payload: the state, which does not change as long as it is served.

    Attributes:
        size: bytes of all tensors.
        digest: the head's.
    """

    def __init__(self, payload: StatePayload) -> None:
        self._tensors = [*payload.tensors.values()]
        self._head = payload.header + b"\n" + payload.plain
        self.size = sum(tensor.nbytes for tensor in self._tensors)
        self.digest = _digest_of([memoryview(self._head)])

    def pieces(self, name: str) -> list[memoryview]:
        """The bytes under a name.

        Raises:
            FileNotFoundError: there are none.
        """
        if name == HEAD:
            return [memoryview(self._head)]
        if not name.startswith(TENSORS):
            raise FileNotFoundError(name)
        try:
            return [self._piece(one) for one in name.removeprefix(TENSORS).split(",")]
        except (ValueError, IndexError) as error:
            raise FileNotFoundError(name) from error

    def _piece(self, asked: str) -> memoryview:
        number, *ranges = asked.split(":")
        tensor = self._tensors[int(number)]
        bounds = [tuple(map(int, one.split("-"))) for one in ranges]
        if bounds:
            tensor = tensor[tuple(slice(start, end) for start, end in bounds)]
        return tensor_bytes(tensor)


def source_of(offered: Mapping[int, OfferedTensors]) -> Source:
    """Serves states, each under the rank of the worker whose state it is."""

    @contextmanager
    def opened(name: str) -> Iterator[Content]:
        rank, _, inner = name.partition("/")
        if not rank.isdecimal() or int(rank) not in offered:
            raise FileNotFoundError(name)
        pieces = offered[int(rank)].pieces(inner)
        yield Content(sum(map(len, pieces)), _digest_of(pieces), _sender(pieces))

    return Source(opened)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host, to be written. One that is not contiguous has none of its own."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _digest_of(pieces: Iterable[memoryview]) -> str:
    digester = Digester()
    for piece in pieces:
        digester.update(piece)
    return digester.digest().digest


def _sender(pieces: Sequence[memoryview]) -> Callable[[socket.socket, int, int], None]:
    def send(line: socket.socket, first: int, count: int) -> None:
        joined = bytearray()
        for piece in pieces:
            wanted = piece[first : first + count]
            first, count = max(0, first - len(piece)), count - len(wanted)
            if len(wanted) < _JOINED_BYTES:
                joined += wanted
                if len(joined) < _JOINED_BYTES:
                    continue
                wanted = memoryview(b"")
            if joined:
                line.sendall(joined)
                joined = bytearray()
            line.sendall(wanted)
        line.sendall(joined)

    return send


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One range that is asked for, and the tensor that it goes to."""

    name: str
    nbytes: int
    target: torch.Tensor


class OfferedPart:
    """Reads a state that is offered: a :class:`swift_ft.checkpoint.layered_part.StateReader`.

    Args:
        address: at which it is served.
        rank: the worker whose state it is.
        secret: the job's.
        digest: the head's.

    Attributes:
        received: bytes of tensors that came.
    """

    def __init__(self, address: str, rank: int, secret: JobSecret, digest: str) -> None:
        self._address = address
        self._folder = f"{WORLDS}/{rank}"
        self._secret = secret
        self._digest = digest
        self.received = 0

    @cached_property
    def _head(self) -> tuple[dict[StatePath, TensorKind], bytes]:
        """The kinds of all tensors, in the order of their numbers, and the plain bytes."""
        head = bytearray()
        for piece in PeerFile(self._address, self._secret, f"{self._folder}/{HEAD}").pieces():
            head += piece
        if _digest_of([memoryview(head)]) != self._digest:
            raise DamagedCheckpointError("the list of tensors does not match its digest", file=HEAD)
        header, _, plain = bytes(head).partition(b"\n")
        return kinds_in(header), plain

    @cached_property
    def _numbers(self) -> dict[StatePath, int]:
        return {path: number for number, path in enumerate(self._head[0])}

    def kinds(self) -> dict[StatePath, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of each tensor, by path."""
        return {path: (kind.dtype, kind.shape) for path, kind in self._head[0].items()}

    def fill(self, state: dict[str, Any]) -> None:
        """Load tensors into those of a state, and the plain bytes into a ``BytesIO`` there.

        Raises:
            OSError: the worker cannot be reached, or does not have them.
            DamagedCheckpointError: what came is not what was sent.
            KeyError, ValueError: it has no such tensor, or one of another shape.
        """
        if isinstance(plain := state.get("plain", {}).get("bytes"), io.BytesIO):
            plain.write(self._head[1])
        wanted = []
        for path, target in tensors_in(state):
            kind = self._head[0][path]
            if kind.shape != tuple(target.shape):
                raise ValueError(f"{'.'.join(path)} is {kind.shape} there and {tuple(target.shape)} here")
            wanted.append(_Wanted(f"{self._numbers[path]}", kind.nbytes, _room_for(target.detach(), kind)))
        self._receive(wanted)
        for (_, target), one in zip(tensors_in(state), wanted, strict=True):
            if one.target.data_ptr() != target.data_ptr():
                target.detach().copy_(one.target)

    def fetch(self, asked: Sequence[tuple[StatePath, TensorKind, Ranges]]) -> list[torch.Tensor]:
        """Fetch ranges of tensors: of each its path, what it is there, and the ranges in it.

        Raises:
            OSError, DamagedCheckpointError: see :meth:`fill`.
        """
        wanted = []
        for path, kind, ranges in asked:
            target = torch.empty([end - start for start, end in ranges], dtype=kind.dtype)
            name = ":".join([f"{self._numbers[path]}", *(f"{start}-{end}" for start, end in ranges)])
            wanted.append(_Wanted(name, target.nbytes, target))
        self._receive(wanted)
        return [one.target for one in wanted]

    def _receive(self, wanted: Sequence[_Wanted]) -> None:
        rest = [one for one in wanted if one.nbytes]
        while rest:
            count, size = 1, rest[0].nbytes
            while count < min(len(rest), _MOST_RANGES) and size + rest[count].nbytes <= _MOST_BYTES:
                size += rest[count].nbytes
                count += 1
            self._receive_at_once(rest[:count])
            rest = rest[count:]

    def _receive_at_once(self, wanted: Sequence[_Wanted]) -> None:
        names = ",".join(one.name for one in wanted)
        file = PeerFile(self._address, self._secret, f"{self._folder}/{TENSORS}{names}")
        digester = Digester()
        size = sum(one.nbytes for one in wanted)
        targets = iter(_memory_of(one.target) for one in wanted)
        target = next(targets)
        for piece in file.pieces():
            if file.size != size:
                raise DamagedCheckpointError(f"{file.size} bytes came instead of {size}", file=names)
            digester.update(piece)
            while len(piece):
                if not len(target):
                    target = next(targets)
                count = min(len(piece), len(target))
                target[:count] = piece[:count]
                piece, target = piece[count:], target[count:]
        if digester.digest().digest != file.version:
            raise DamagedCheckpointError("tensors do not match their digest", file=names)
        self.received += size


def _room_for(target: torch.Tensor, kind: TensorKind) -> torch.Tensor:
    """The memory into which a tensor's bytes are received: its own, if it is laid out as they come."""
    if target.device.type == "cpu" and target.is_contiguous() and target.dtype == kind.dtype:
        return target
    return torch.empty(kind.shape, dtype=kind.dtype)
