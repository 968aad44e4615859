"""Plain bytes on their way from one member of a parallel replay to another.

length + the first bytes ─▶ the rest, if there is any
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import wait_on_host

_LEAD_BYTES = 16 * 2**10
"""What travels with the length. A small message costs the time of one, not of its bytes."""
_LENGTH_BYTES = 8


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
        wait_on_host([self._work])
        lead = self._lead.cpu().numpy().tobytes()
        size = int.from_bytes(lead[:_LENGTH_BYTES], "little")
        found = lead[_LENGTH_BYTES : _LENGTH_BYTES + size]
        if missing := size - len(found):
            rest = torch.empty(missing, dtype=torch.uint8, device=self._link.device)
            wait_on_host([self._link.carry(rest)])
            found += rest.cpu().numpy().tobytes()
        return found
