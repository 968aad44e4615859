"""State on its way from one replica to others: a header, then buckets, all by broadcast (paper §4).

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

from swift_ft.recovery.state import Path, TensorKind

__all__ = ["Parcel", "device_of", "receive", "send"]

_BUCKET_BYTES = 4 * 2**20
_IN_FLIGHT = 3
"""Buckets under way at a time: one is copied while others travel."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is sent.

    Attributes:
        tensors: by path.
        plain: everything else, as bytes.
    """

    tensors: Mapping[Path, torch.Tensor]
    plain: bytes = b""


def send(
    parcel: Parcel, group: dist.ProcessGroup, rank: int, on_bucket: Callable[[int], None] = lambda _: None
) -> None:
    """Send a parcel to all others in a group.

    Args:
        parcel: what.
        group: who.
        rank: the sender, this worker.
        on_bucket: told before each bucket.

    Raises:
        RuntimeError: as torch does, if somebody in the group is gone.
    """
    kinds = [[list(p), str(t.dtype).removeprefix("torch."), list(t.shape)] for p, t in parcel.tensors.items()]
    header = json.dumps({"tensors": kinds, "plain": len(parcel.plain)}).encode()
    body = torch.frombuffer(bytearray(header + parcel.plain), dtype=torch.uint8)
    device = device_of(group)
    dist.broadcast(torch.tensor([len(header), body.numel()], device=device), rank, group)
    dist.broadcast(body.to(device), rank, group)
    kinds_by_path = {path: TensorKind(t.dtype, tuple(t.shape)) for path, t in parcel.tensors.items()}
    under_way: deque[dist.Work] = deque()
    for number, paths in enumerate(_buckets(kinds_by_path)):
        on_bucket(number)
        flat = torch.cat([parcel.tensors[path].detach().reshape(-1).to(device) for path in paths])
        under_way.append(_broadcast(flat, rank, group))
        if len(under_way) == _IN_FLIGHT:
            under_way.popleft().wait()
    for work in under_way:
        work.wait()


def receive(
    group: dist.ProcessGroup,
    source: int,
    place: Callable[[dict[Path, TensorKind]], Mapping[Path, torch.Tensor]],
    on_bucket: Callable[[int], None] = lambda _: None,
) -> Parcel:
    """Receive a parcel.

    Args:
        group: who takes part.
        source: the sender's rank.
        place: called once with what comes; returns the tensors to be filled.
        on_bucket: told before each bucket.

    Returns:
        What ``place`` returned, filled, and the plain bytes.

    Raises:
        RuntimeError: as torch does, if somebody in the group is gone.
    """
    device = device_of(group)
    lengths = torch.zeros(2, dtype=torch.int64, device=device)
    dist.broadcast(lengths, source, group)
    header_bytes, body_bytes = lengths.tolist()
    body = torch.empty(body_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(body, source, group)
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
        work.wait()
        pieces = torch.split(flat, [_elements(kinds[path]) for path in paths])
        with torch.no_grad():
            for path, piece in zip(paths, pieces, strict=True):
                tensors[path].copy_(piece.view(kinds[path].shape))

    for number, paths in enumerate(_buckets(kinds)):
        on_bucket(number)
        elements = sum(_elements(kinds[path]) for path in paths)
        flat = torch.empty(elements, dtype=kinds[paths[0]].dtype, device=device)
        under_way.append((_broadcast(flat, source, group), flat, paths))
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


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = dist.broadcast(tensor, source, group, async_op=True)
    return work


def _elements(kind: TensorKind) -> int:
    return torch.Size(kind.shape).numel()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a group's backend wants its tensors."""
    devices = group._device_types
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]
