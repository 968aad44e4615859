"""An example training (EXAMPLE, a module) on a dataset that is shuffled and loaded by workers."""

import importlib
import os
from typing import Any

import torch
from gpt import Config, load_text
from torch.utils.data import Dataset

from swift_ft.data import IndexedBatches

WORKERS = 1


class Windows(Dataset[Any]):
    """Windows of the text, each with some random byte in it; one epoch has a few batches."""

    def __init__(self, config: Config) -> None:
        self._text = load_text()
        self._sequence = config.sequence

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * 97
        window = self._text[start : start + self._sequence + 1].long()
        window[torch.randint(len(window), (1,))] = 32
        return window[:-1], window[1:]


def batches(config: Config, _: torch.device) -> IndexedBatches:
    size = config.microbatches * config.microbatch_size
    return IndexedBatches(Windows(config), size, shuffle=True, seed=3, drop_last=True, num_workers=WORKERS)


example: Any = importlib.import_module(os.environ["EXAMPLE"])
example.Batches = batches
example.main()
