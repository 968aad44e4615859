"""Common to the trainings with Lightning's Trainer: their data, and what each leaves behind."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import TensorDataset


def data(seed: int, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, (x[:, :4].argmax(1)))


def leave(trainer: Trainer, out: Path, **own: Any) -> None:
    """Write what the trainer ends with, and what only this training has."""
    ends_with = {
        "global_step": trainer.global_step,
        "loops": trainer.fit_loop.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "callbacks": [callback.state_dict() for callback in trainer.callbacks],
    }
    torch.save({**own, **ends_with}, out / f"rank{trainer.global_rank}.pt")
