"""A part of a state whose parameter no module has."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Temperature:
    """Saves a parameter that is in no module."""

    def __init__(self) -> None:
        self.value = nn.Parameter(torch.ones(()))

    def state_dict(self) -> dict[str, Tensor]:
        """What is saved."""
        return {"value": self.value.detach()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse."""
        self.value.data.copy_(state["value"])
