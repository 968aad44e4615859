"""State on its way from one worker to others: a header, then buckets (paper §4, §5.2).

    length ─▶ header (JSON: what comes) + plain values ─▶ bucket ─▶ bucket ─▶ ...

A survivor receives into new tensors and adopts them when all are there, so that the death of the
source leaves it with the state that it had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from swift_ft.checkpoint.state_payload import Allocate, StatePath, StatePayload, TensorKind, kinds_in
from swift_ft.failpoints import Point, hit
from swift_ft.torch_adapters.communication import device_of, wait_for

__all__ = ["Link", "receive", "send"]

_BUCKET_BYTES = 4 * 2**20
_IN_FLIGHT = 3
"""Buckets in flight at a time: one is copied while others travel."""


@dataclass(frozen=True, slots=True)
class Link:
    """The sender and the receivers of a transfer.

    Attributes:
        group: contains both ends.
        source: the sender's rank.
        target: the receiver's rank; None for all others in the group.
        iteration: for a replica's state, the interrupted iteration; None in a replay.
    """

    group: dist.ProcessGroup
    source: int
    target: int | None = None
    iteration: int | None = None

    @property
    def device(self) -> torch.device:
        """The device on which the group's backend needs its tensors."""
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

    def hit_bucket(self, number: int) -> None:
        """A bucket is about to travel."""
        if self.iteration is not None:
            hit(Point.TRANSFER, self.iteration, number)


def send(payload: StatePayload, link: Link) -> None:
    """Send a payload.

    Args:
        payload: the tensors and plain bytes.
        link: the sender and the receivers.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
    """
    header = payload.header()
    body = torch.frombuffer(bytearray(header + payload.plain), dtype=torch.uint8)
    lengths = torch.tensor([len(header), body.numel()], device=link.device)
    under_way = deque([link.carry(lengths), link.carry(body.to(link.device))])
    for number, paths in enumerate(_buckets(payload.kinds)):
        link.hit_bucket(number)
        flat = torch.cat([payload.tensors[path].detach().reshape(-1).to(link.device) for path in paths])
        under_way.append(link.carry(flat))
        if len(under_way) == _IN_FLIGHT:
            wait_for([under_way.popleft()])
    while under_way:
        wait_for([under_way.popleft()])


def receive(link: Link, allocate: Allocate) -> StatePayload:
    """Receive a payload.

    Args:
        link: the sender and the receivers.
        allocate: called once with the shapes and dtypes that arrive; returns the tensors to be filled.

    Returns:
        The tensors that ``allocate`` returned, filled, and the plain bytes.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
    """
    lengths = torch.zeros(2, dtype=torch.int64, device=link.device)
    wait_for([link.carry(lengths)])
    header_bytes, body_bytes = lengths.tolist()
    body = torch.empty(body_bytes, dtype=torch.uint8, device=link.device)
    wait_for([link.carry(body)])
    raw = body.cpu().numpy().tobytes()
    kinds = kinds_in(raw[:header_bytes])
    tensors = allocate(kinds)
    under_way: deque[tuple[dist.Work, torch.Tensor, list[StatePath]]] = deque()

    def unpack() -> None:
        work, flat, paths = under_way.popleft()
        wait_for([work])
        pieces = torch.split(flat, [kinds[path].elements for path in paths])
        with torch.no_grad():
            for path, piece in zip(paths, pieces, strict=True):
                tensors[path].copy_(piece.view(kinds[path].shape))

    for number, paths in enumerate(_buckets(kinds)):
        link.hit_bucket(number)
        elements = sum(kinds[path].elements for path in paths)
        flat = torch.empty(elements, dtype=kinds[paths[0]].dtype, device=link.device)
        under_way.append((link.carry(flat), flat, paths))
        if len(under_way) == _IN_FLIGHT:
            unpack()
    while under_way:
        unpack()
    return StatePayload({path: tensors[path] for path in kinds}, raw[header_bytes:])


def _buckets(kinds: Mapping[StatePath, TensorKind]) -> Iterator[list[StatePath]]:
    """Tensors of one dtype together, in order, up to the size of a bucket."""
    for dtype in dict.fromkeys(kind.dtype for kind in kinds.values()):
        bucket: list[StatePath] = []
        size = 0
        for path, kind in kinds.items():
            if kind.dtype != dtype:
                continue
            if bucket and size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(path)
            size += kind.elements * dtype.itemsize
        yield bucket
