"""State on its way from one worker to others: a header, then buckets (paper §4, §5.2).

    length ─▶ header (JSON: what comes) + plain values ─▶ bucket ─▶ bucket ─▶ ...

A survivor puts what it receives aside and takes it over when all of it is there, so that the death of the
source leaves it with the state that it had.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from swift_ft.recovery.state import Path, TensorKind

__all__ = ["Lane", "Parcel", "Place", "device_of", "fresh_on", "receive", "send", "wait"]

_BUCKET_BYTES = 4 * 2**20
_IN_FLIGHT = 3
"""Buckets under way at a time: one is copied while others travel."""


Place = Callable[[dict[Path, TensorKind]], Mapping[Path, torch.Tensor]]
"""Told what comes, gives the tensors that it is put into."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is sent.

    Attributes:
        tensors: by path.
        plain: everything else, as bytes.
    """

    tensors: Mapping[Path, torch.Tensor]
    plain: bytes = b""


@dataclass(frozen=True, slots=True)
class Lane:
    """From whom to whom.

    Attributes:
        group: both ends are in it.
        source: the sender's rank.
        target: the receiver's rank; None for all others in the group.
    """

    group: dist.ProcessGroup
    source: int
    target: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the group's backend wants its tensors."""
        return device_of(self.group)

    def carry(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to send a tensor, or to receive into it."""
        work: dist.Work | None
        if self.target is None:
            work = dist.broadcast(tensor, self.source, self.group, async_op=True)
        elif dist.get_rank() == self.source:
            work = dist.isend(tensor, self.target, self.group)
        else:
            work = dist.irecv(tensor, self.source, self.group)
        assert work is not None
        return work


def send(parcel: Parcel, lane: Lane, on_bucket: Callable[[int], None] = lambda _: None) -> None:
    """Send a parcel.

    Args:
        parcel: what.
        lane: to whom.
        on_bucket: told before each bucket.

    Raises:
        RuntimeError: as torch does, if somebody is gone.
    """
    kinds = [[list(p), str(t.dtype).removeprefix("torch."), list(t.shape)] for p, t in parcel.tensors.items()]
    header = json.dumps({"tensors": kinds, "plain": len(parcel.plain)}).encode()
    body = torch.frombuffer(bytearray(header + parcel.plain), dtype=torch.uint8)
    lengths = torch.tensor([len(header), body.numel()], device=lane.device)
    under_way = deque([lane.carry(lengths), lane.carry(body.to(lane.device))])
    kinds_by_path = {path: TensorKind(t.dtype, tuple(t.shape)) for path, t in parcel.tensors.items()}
    for number, paths in enumerate(_buckets(kinds_by_path)):
        on_bucket(number)
        flat = torch.cat([parcel.tensors[path].detach().reshape(-1).to(lane.device) for path in paths])
        under_way.append(lane.carry(flat))
        if len(under_way) == _IN_FLIGHT:
            wait(under_way.popleft())
    while under_way:
        wait(under_way.popleft())


def fresh_on(device: torch.device) -> Place:
    """New tensors for what comes."""
    return lambda kinds: {p: torch.empty(k.shape, dtype=k.dtype, device=device) for p, k in kinds.items()}


def receive(
    lane: Lane,
    place: Place,
    on_bucket: Callable[[int], None] = lambda _: None,
) -> Parcel:
    """Receive a parcel.

    Args:
        lane: from whom.
        place: called once with what comes; returns the tensors to be filled.
        on_bucket: told before each bucket.

    Returns:
        What ``place`` returned, filled, and the plain bytes.

    Raises:
        RuntimeError: as torch does, if somebody is gone.
    """
    lengths = torch.zeros(2, dtype=torch.int64, device=lane.device)
    wait(lane.carry(lengths))
    header_bytes, body_bytes = lengths.tolist()
    body = torch.empty(body_bytes, dtype=torch.uint8, device=lane.device)
    wait(lane.carry(body))
    raw = body.cpu().numpy().tobytes()
    header = json.loads(raw[:header_bytes])
    kinds = {
        tuple(path): TensorKind(getattr(torch, dtype), tuple(shape))
        for path, dtype, shape in header["tensors"]
    }
    tensors = place(kinds)
    under_way: deque[tuple[dist.Work, torch.Tensor, list[Path]]] = deque()

    def unpack() -> None:
        work, flat, paths = under_way.popleft()
        wait(work)
        pieces = torch.split(flat, [_elements(kinds[path]) for path in paths])
        with torch.no_grad():
            for path, piece in zip(paths, pieces, strict=True):
                tensors[path].copy_(piece.view(kinds[path].shape))

    for number, paths in enumerate(_buckets(kinds)):
        on_bucket(number)
        elements = sum(_elements(kinds[path]) for path in paths)
        flat = torch.empty(elements, dtype=kinds[paths[0]].dtype, device=lane.device)
        under_way.append((lane.carry(flat), flat, paths))
        if len(under_way) == _IN_FLIGHT:
            unpack()
    while under_way:
        unpack()
    return Parcel({path: tensors[path] for path in kinds}, raw[header_bytes:])


def _buckets(kinds: Mapping[Path, TensorKind]) -> Iterator[list[Path]]:
    """Tensors of one dtype together, in order, up to the size of a bucket."""
    for dtype in dict.fromkeys(kind.dtype for kind in kinds.values()):
        bucket: list[Path] = []
        size = 0
        for path, kind in kinds.items():
            if kind.dtype != dtype:
                continue
            if bucket and size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(path)
            size += _elements(kind) * dtype.itemsize
        yield bucket


def wait(work: dist.Work) -> None:
    """Wait for what was begun.

    Raises:
        RuntimeError: as torch does, if the other end is gone.
    """
    schedules._wait_batch_p2p([work])  # as it is now: see `waits.py`


def _elements(kind: TensorKind) -> int:
    return torch.Size(kind.shape).numel()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a group's backend wants its tensors."""
    devices = group._device_types
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]
