"""The examples with running statistics in the model, which no version counter counts (STATISTICS).

``"ddp"`` puts a BatchNorm into the model of ``train_ddp``, and ``"own"`` also lets DDP keep no buffers equal.
``"pipeline"`` puts one into each stage of ``train_swift``, and ``"hybrid"`` of
``train_hybrid``.
"""

import functools
import importlib
import os
from typing import Any

import torch
from torch import nn

from swift_ft.torch_adapters.versions.buffer_sync import BUFFER_SYNC

what = os.environ["STATISTICS"]
example: Any = importlib.import_module(
    {"pipeline": "train_swift", "hybrid": "train_hybrid"}.get(what, "train_ddp")
)
original = example.build_stage


class Normed(nn.Module):
    """A stage with a normalisation behind it, and a buffer that each forward pass replaces."""

    total: torch.Tensor

    def __init__(self, stage: nn.Module, sequence: int) -> None:
        super().__init__()
        self.stage = stage
        self.norm = nn.BatchNorm1d(sequence)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        y = self.stage(x)
        self.total = self.total + y.detach().mean()
        return self.norm(y)


def build_stage(stage_index: int, num_stages: int, config: Any) -> nn.Module:
    return Normed(original(stage_index, num_stages, config), config.sequence)


example.build_stage = build_stage
if what == "own":
    example.DistributedDataParallel = functools.partial(
        example.DistributedDataParallel, **{BUFFER_SYNC: False}
    )
main = example.main
if __name__ == "__main__":
    main()
