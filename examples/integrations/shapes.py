"""Pictures of shapes, and a small CNN that tells them apart: what the data-parallel examples train.

Everything is a pure function of its arguments, so no data set is downloaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 16
"""Pixels along each side of a picture."""

_KINDS = 4  # a horizontal bar, a vertical bar, a square, a ring


class Shapes(Dataset[tuple[Tensor, int]]):
    """Noisy pictures of float32, shape ``(1, SIZE, SIZE)``, each with the number of its kind.

    Args:
        length: how many there are.
    """

    def __init__(self, length: int = 512) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The picture of an index is always the same."""
        generator = torch.Generator().manual_seed(index)
        kind = index % _KINDS
        picture = 0.5 * torch.randn(SIZE, SIZE, generator=generator)
        top, left = (int(torch.randint(SIZE - 8, (), generator=generator)) for _ in range(2))
        place = picture[top : top + 8, left : left + 8]
        if kind == 0:
            place[3:5] += 2
        elif kind == 1:
            place[:, 3:5] += 2
        else:
            place += 2
        if kind == 3:
            place[2:6, 2:6] -= 2
        return picture.unsqueeze(0), kind


def build_cnn(seed: int = 0) -> nn.Sequential:
    """Two convolutions with BatchNorm, and a linear layer: pictures to logits.

    Args:
        seed: of the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(16, _KINDS)),
        )
