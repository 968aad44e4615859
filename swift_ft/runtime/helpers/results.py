"""Results of microbatches on their way to the owner of their stages (paper §5.2).

    member    computes ─▶ its messages, at once ─▶ ... ─▶ computes the last one ─▶ gradients ─▶ its messages
              ─▶ checksums, losses, outputs
    owner     computes its own share ─▶ receives all in this order

A schedule's microbatches have messages of the same shapes. So an owner knows from its own ones what arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from swift_ft.checkpoint.state_payload import pack, unpack
from swift_ft.logging import Direction
from swift_ft.runtime.helpers.pieces import as_it_travels
from swift_ft.runtime.helpers.plain_bytes import Arriving, send_plain
from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import wait_for
from swift_ft.torch_adapters.pipelining.microbatch import Computed
from swift_ft.torch_adapters.pipelining.p2p_routes import Route


def send_messages(result: Computed, link: Link) -> list[dist.Work]:
    """Begin to send the messages of a microbatch to their owner, who logs them."""
    return [link.carry(as_it_travels(tensor, link.device)) for tensor in result.sent.values()]


def send_others(results: Mapping[int, Computed], link: Link) -> list[dist.Work]:
    """Begin to send everything else but gradients.

    Args:
        results: of all microbatches of this worker.
        link: to the owner.
    """
    plain = {
        microbatch: {
            "received": [(_route_to_text(route), value) for route, value in result.received.items()],
            "output": result.output,
            "loss": result.loss,
            "random": result.random,
        }
        for microbatch, result in results.items()
    }
    return send_plain(pack(plain), link)


class ArrivingResults:
    """The results of a member that are about to be received.

    Args:
        link: from the member to the owner, this worker.
        microbatches: the member's share.
        like: any of the owner's own microbatches.
        device: of the stages.
    """

    def __init__(self, link: Link, microbatches: Sequence[int], like: Computed, device: torch.device) -> None:
        self._link, self._microbatches, self._like, self._device = link, microbatches, like, device
        self._messages: dict[tuple[int, Route], torch.Tensor] = {}
        self._works: list[dist.Work] = []

    def expect(self, which: slice) -> None:
        """Begin to receive the messages of these of the microbatches."""
        for microbatch in self._microbatches[which]:
            for route, tensor in self._like.sent.items():
                message = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._link.device)
                self._messages[microbatch, route] = message
                self._works.append(self._link.carry(message))

    def take(self) -> dict[int, Computed]:
        """By microbatch, without gradients. Call it when all messages are expected.

        Raises:
            RuntimeError: as torch does, if the member is gone.
        """
        others = Arriving(self._link)
        wait_for(self._works)
        results = {}
        for microbatch, plain in unpack(others.take(), self._device).items():
            results[microbatch] = Computed(
                received={_route_from_text(*text): checksum for text, checksum in plain["received"]},
                output=plain["output"],
                loss=plain["loss"],
                random=plain["random"],
            )
        for (microbatch, route), tensor in self._messages.items():
            results[microbatch].sent[route] = tensor.to(self._device)
        return results


def _route_to_text(route: Route) -> tuple[str, str, str, str]:
    return (str(route.direction), str(route.source), str(route.destination), str(route.slot))


def _route_from_text(direction: str, source: str, destination: str, slot: str) -> Route:
    return Route(Direction(direction), int(source), int(destination), int(slot))
