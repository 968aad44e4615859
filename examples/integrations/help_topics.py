"""The text that the examples learn: the help topics that every CPython carries, so nothing is downloaded."""

import pydoc_data.topics

import torch
from torch import Tensor


class HelpTopics:
    """Windows of bytes, by iteration: ``batches[i]`` is the same whenever it is asked for.

    Args:
        batch_size: windows per iteration.
        sequence: bytes per window.
        seed: another one gives other windows, for validation for example.
    """

    def __init__(self, batch_size: int, sequence: int, seed: int = 0) -> None:
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._shape = batch_size, sequence
        self._seed = seed

    def __getitem__(self, iteration: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (the next bytes), int64, each of shape ``(batch_size, sequence)``."""
        batch_size, sequence = self._shape
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + iteration)
        starts = torch.randint(len(self._text) - sequence, (batch_size, 1), generator=generator)
        windows = self._text[starts + torch.arange(sequence + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:]  # torch 2.11 takes no other input for a pipeline
