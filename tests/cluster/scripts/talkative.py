"""The example training with a collective after the optimizer's step: what a session cannot undo.

With WRAPPED set, the optimizer is wrapped: an undo takes its update back, and rounds.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import train_swift

import swift_ft


class Talkative(torch.optim.AdamW):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))


def wrapped(*args: Any, **arguments: Any) -> torch.optim.Optimizer:
    return swift_ft.wrap_optimizer(Talkative(*args, **arguments))


torch.optim.AdamW = wrapped if os.environ.get("WRAPPED") else Talkative  # type: ignore[misc,assignment]
train_swift.main()
