"""Layers that compute little and take their time, and samples for them: shared by several scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FORWARD_MS = (4, 9, 5, 5, 12, 5, 7, 5, 5, 8)
MICROBATCHES, MICROBATCH, WIDTH = 8, 2, 16

Busy = Callable[[int], None]
"""Uses the device for so long: milliseconds, or what a script counts in."""


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Each sample is an input and a target."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))
        return x, y


class Takes(torch.autograd.Function):
    """Takes its time forward, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, takes: int, busy: Busy) -> Tensor:
        """Keep the device."""
        ctx.takes, ctx.busy = takes, busy
        busy(takes)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Keep the device."""
        ctx.busy(2 * ctx.takes)
        return gradient, None, None


class Layer(nn.Module):
    """One of the model.

    Args:
        number: of the layer.
        busy: how the device is used.
        takes: how long it is, forward; by default ``FORWARD_MS`` says so.
        width: of what goes in and out.
    """

    def __init__(self, number: int, busy: Busy, takes: int | None = None, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(width, width)
        self.takes = FORWARD_MS[number] if takes is None else takes
        self._busy = busy

    def forward(self, x: Tensor) -> Tensor:
        """Compute next to nothing, and take its time."""
        taken: Tensor = Takes.apply(self.linear(x), self.takes, self._busy)  # type: ignore[no-untyped-call]
        return taken
