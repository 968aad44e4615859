"""Tensors whose shapes both ends know: no header, and large ones without a copy.

    large tensor ───────────────────────────▶ as it is
    small tensors of one dtype ─▶ joined ───▶ one piece ─▶ apart

A host that computes at the same time has no cycles to spare for copies, and a message is not much cheaper
than a copy of some hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from swift_ft.runtime.replicas.buckets import in_buckets
from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import travels_in_place, wait_on_host

Key = TypeVar("Key", bound=Hashable)


_LEAD_BYTES = 16 * 2**10
"""Bytes of the first message, which has the length. So a small payload costs the time of one message."""
_LENGTH_BYTES = 8


class Piece(Generic[Key]):
    """Some tensors that travel together.

    Args:
        tensors: they themselves, of one dtype: all that counts here is what they look like.
        device: where the group takes what travels.
    """

    def __init__(self, keys: Sequence[Key], tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.keys = keys
        self._shapes = [tensor.shape for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self._dtype = tensors[0].dtype
        self._device = device

    def empty(self) -> torch.Tensor:
        """One flat tensor to receive into."""
        return torch.empty(sum(self._sizes), dtype=self._dtype, device=self._device)

    def join(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """One flat tensor with the values of all, which is the tensor itself where that is possible.

        Args:
            tensors: with None for one whose values do not matter.
        """
        if len(tensors) == 1 and tensors[0] is not None:
            return as_it_travels(tensors[0], self._device).view(-1)
        flat = self.empty()
        with torch.no_grad():
            for view, tensor in zip(self.views(flat), tensors, strict=True):
                if tensor is not None:
                    view.copy_(tensor)
        return flat

    def target(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One flat tensor to receive into: the tensor itself where that is possible. :meth:`fill` follows."""
        if len(tensors) == 1 and travels_in_place(tensors[0], self._device):
            return tensors[0].detach().view(-1)
        return self.empty()

    def fill(self, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Give the tensors the values that have arrived."""
        with torch.no_grad():
            for tensor, view in zip(tensors, self.views(flat), strict=True):
                # Not `is`: target() may have given the group a view of the same memory.
                if tensor.data_ptr() != view.data_ptr():
                    tensor.copy_(view)
                else:
                    increment_version(tensor)  # the group writes past torch's counter

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as parts of a flat one."""
        parts = torch.split(flat, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def as_it_travels(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor whose memory is its values in row-major order: itself, where that is possible."""
    return tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()


def pieces_of(tensors: Mapping[Key, torch.Tensor], device: torch.device | None = None) -> list[Piece[Key]]:
    """All tensors in pieces. Both ends come to the same ones.

    Args:
        tensors: all that travel, in the same order at both ends. Their values do not matter here.
        device: where the group takes what travels; by default, where the tensors are.
    """
    return [
        Piece(keys, [tensors[key] for key in keys], device or tensors[keys[0]].device)
        for keys in in_buckets({key: (tensor.dtype, tensor.nbytes) for key, tensor in tensors.items()})
    ]


# Plain bytes on their way from one member of a parallel replay to another.
#
# length + the first bytes ─▶ the rest, if there is any


def send_plain(data: bytes, link: Link) -> list[dist.Work]:
    """Begin to send plain bytes, to where :class:`Arriving` takes them."""
    whole = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    parts = [whole[:_LEAD_BYTES].ljust(_LEAD_BYTES, b"\0"), whole[_LEAD_BYTES:]]
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]
    return [link.carry(tensor.to(link.device)) for tensor in tensors]


class Arriving:
    """Plain bytes that are about to be received.

    Args:
        link: the sender and the receiver.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lead = torch.empty(_LEAD_BYTES, dtype=torch.uint8, device=link.device)
        self._work = link.carry(self._lead)

    def take(self) -> bytes:
        """The bytes.

        Raises:
            RuntimeError: as torch does, if the sender is gone.
        """
        wait_on_host([self._work], [self._lead.device])
        lead = self._lead.cpu().numpy().tobytes()
        size = int.from_bytes(lead[:_LENGTH_BYTES], "little")
        found = lead[_LENGTH_BYTES : _LENGTH_BYTES + size]
        if missing := size - len(found):
            rest = torch.empty(missing, dtype=torch.uint8, device=self._link.device)
            wait_on_host([self._link.carry(rest)], [rest.device])
            found += rest.cpu().numpy().tobytes()
        return found
