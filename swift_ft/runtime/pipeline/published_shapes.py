"""The shapes of each stage's messages, in the rendezvous store: a replacement begins its replay with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swift_ft.config import store_keys
from swift_ft.errors import RecoveryError
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore


@dataclass(slots=True)
class PublishedShapes:
    """The shapes of one pipeline's messages.

    Attributes:
        rendezvous: where they are published.
        layout: the number of layers of each stage; empty before any layer has moved.
    """

    rendezvous: RendezvousStore
    layout: StageLayers = ()

    def publish(self, shapes: Mapping[int, dict[str, Any]]) -> None:
        """Publish the shapes of some stages."""
        for stage, one in shapes.items():
            self.rendezvous.set(store_keys.shapes(stage, self.layout), json.dumps(one))

    def find(self, stages: Iterable[int]) -> dict[int, dict[str, Any]] | None:
        """The shapes of stages; None if those of any were never published."""
        keys = {stage: store_keys.shapes(stage, self.layout) for stage in stages}
        if not self.rendezvous.check([*keys.values()]):
            return None
        return {stage: json.loads(self.rendezvous.get(key)) for stage, key in keys.items()}

    def of_lost(self, stages: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The shapes of stages that are replayed.

        Raises:
            RecoveryError: they were never published.
        """
        if (found := self.find(stages)) is None:
            raise RecoveryError("the shapes of the lost stages' messages were never published")
        return found
