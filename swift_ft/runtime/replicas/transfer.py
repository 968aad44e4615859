"""State on its way from one worker to others: a header, then buckets (paper §4, §5.2).

    length ─▶ header (JSON: what comes) + plain values ─▶ bucket ─▶ bucket ─▶ ... ─▶ digests of the buckets

Small tensors share a bucket. A large one travels from its own memory into that of the receiver's tensor,
where the group can reach both: copies would take as long as the way. Each end takes digests while other
buckets travel.

A survivor receives into new tensors and adopts them when all are there, so that the death of the
source leaves it with the state that it had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch.autograd.graph import increment_version

from swift_ft.checkpoint.state_digest import listed, weighted_sum
from swift_ft.checkpoint.state_payload import Allocate, StatePath, StatePayload, TensorKind, kinds_in
from swift_ft.errors import RecoveryError
from swift_ft.faults.failpoints import Point, hit
from swift_ft.runtime.replicas.buckets import in_buckets
from swift_ft.torch_adapters.communication import device_of, travels_in_place, wait_for, wait_on_host
from swift_ft.torch_adapters.lasting_group import beginning

_IN_FLIGHT = 32
_COPIES_IN_FLIGHT = 4
"""Buckets in flight at a time, and how many of these may be copies: some are made while others travel."""


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
        with beginning(self.group):
            # To one receiver by messages: in a broadcast each costs gloo a round of its own (decision 39).
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


@dataclass(frozen=True, slots=True)
class _Flight:
    """A bucket on its way.

    Attributes:
        work: carries it.
        flat: its bytes, of shape (bytes,).
        is_copy: they are not the memory of a tensor of the state.
    """

    work: dist.Work
    flat: torch.Tensor
    is_copy: bool = False


def send(payload: StatePayload, link: Link) -> None:
    """Send a payload. Its tensors must not change meanwhile.

    Args:
        payload: the tensors and plain bytes.
        link: the sender and the receivers.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
    """
    header = payload.header
    body = torch.frombuffer(bytearray(header + payload.plain), dtype=torch.uint8).to(link.device)
    # The receiver has to make tensors of the right sizes before anything can arrive in them.
    lengths = torch.tensor([len(header), body.numel()], device=link.device)
    under_way = deque([_Flight(link.carry(lengths), lengths), _Flight(link.carry(body), body)])
    digests: list[torch.Tensor] = []
    for number, paths in enumerate(_buckets(payload.kinds)):
        link.hit_bucket(number)
        tensors = [payload.tensors[path].detach() for path in paths]
        # Copies at both ends would cost as much as the transfer (decision 39).
        own = _own_memory(tensors, link.device)
        flat = _joined(tensors, link.device) if own is None else own
        under_way.append(_Flight(link.carry(flat), flat, is_copy=own is None))
        # While others travel: one over the whole state would cost its time before and after (decision 39).
        digests.append(_digest(flat))
        if _is_full(under_way):
            _land_some(under_way)
    if digests:
        sums = torch.stack(digests)
        under_way.append(_Flight(link.carry(sums), sums))
    wait_for([flight.work for flight in under_way])


def receive(
    link: Link, allocate: Allocate, meanwhile: Callable[[bytes], object] = lambda plain: None
) -> StatePayload:
    """Receive a payload.

    Args:
        link: the sender and the receivers.
        allocate: called once with the shapes and dtypes that arrive; returns the tensors to be filled.
        meanwhile: called once with the plain bytes, while the tensors travel.

    Returns:
        The tensors that ``allocate`` returned, filled, and the plain bytes.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
        RecoveryError: what arrived is not what was sent.
    """
    lengths = torch.zeros(2, dtype=torch.int64, device=link.device)
    wait_on_host([link.carry(lengths)], [link.device])
    header_bytes, body_bytes = lengths.tolist()
    body = torch.empty(body_bytes, dtype=torch.uint8, device=link.device)
    wait_on_host([link.carry(body)], [link.device])
    raw = body.cpu().numpy().tobytes()
    kinds, plain = kinds_in(raw[:header_bytes]), raw[header_bytes:]
    tensors = allocate(kinds)
    buckets = list(_buckets(kinds))
    targets = [[tensors[path].detach() for path in paths] for paths in buckets]
    under_way: deque[_Flight] = deque()
    begun = 0

    def begin_more() -> None:
        nonlocal begun
        while begun < len(buckets) and not _is_full(under_way):
            link.hit_bucket(begun)
            own = _own_memory(targets[begun], link.device)
            size = sum(kinds[path].nbytes for path in buckets[begun])
            flat = torch.empty(size, dtype=torch.uint8, device=link.device) if own is None else own
            under_way.append(_Flight(link.carry(flat), flat, is_copy=own is None))
            begun += 1

    begin_more()
    # Tensors are arriving by now (decision 39).
    meanwhile(plain)
    digests: list[torch.Tensor] = []
    while under_way:
        landed = _land_some(under_way)
        begin_more()
        for flight in landed:
            into = targets[len(digests)]
            digests.append(_digest(flight.flat))
            if flight.is_copy:
                _split(flight.flat, into)
            else:
                increment_version(into)  # the group writes past torch's counter
    if digests:
        sums = torch.empty(len(digests), dtype=torch.int64, device=link.device)
        wait_on_host([link.carry(sums)], {sums.device, *(digest.device for digest in digests)})
        differ = (sums != torch.stack(digests)).tolist()
        names = [".".join(path) for paths, bad in zip(buckets, differ, strict=True) if bad for path in paths]
        if names:
            raise RecoveryError(
                f"the state from worker {link.source} is not the one that it sent: {listed(names)} differ"
            )
    return StatePayload({path: tensors[path] for path in kinds}, plain)


def _is_full(under_way: Sequence[_Flight]) -> bool:
    """Whether nothing more may begin to travel."""
    copies = sum(flight.is_copy for flight in under_way)
    return len(under_way) >= _IN_FLIGHT or copies >= _COPIES_IN_FLIGHT


def _land_some(under_way: deque[_Flight]) -> list[_Flight]:
    """Wait for half of what travels: another thread waits, and each time both threads have to wake.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
    """
    landed = [under_way.popleft() for _ in range((len(under_way) + 1) // 2)]
    wait_for([flight.work for flight in landed])
    return landed


def _own_memory(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The bytes of a bucket's only tensor, as they are in memory; None where a copy has to travel."""
    if len(tensors) > 1 or not travels_in_place(tensors[0], device):
        return None
    return tensors[0].view(-1).view(torch.uint8)


def _joined(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    flat = torch.cat([tensor.reshape(-1).to(device) for tensor in tensors])
    return flat.view(torch.uint8)


def _split(flat: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Give each tensor its part of a bucket."""
    pieces = flat.split([tensor.numel() * tensor.element_size() for tensor in into])
    with torch.no_grad():
        for tensor, piece in zip(into, pieces, strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _digest(flat: torch.Tensor) -> torch.Tensor:
    """Of a bucket's bytes: an int64 of no dimension, on their device."""
    if flat.device.type != "cpu":
        return weighted_sum(flat)
    # Shifted into the range of int64, in which no bit is lost.
    return torch.tensor(xxhash.xxh3_64_intdigest(flat.numpy().data) - 2**63)


def _buckets(kinds: Mapping[StatePath, TensorKind]) -> Iterator[list[StatePath]]:
    return in_buckets({path: (kind.dtype, kind.nbytes) for path, kind in kinds.items()})
