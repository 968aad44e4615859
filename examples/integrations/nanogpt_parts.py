"""Common to both loops in the manner of nanoGPT: their arguments, their batches, and the rate."""

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
from gpt import load_text
from torch import Tensor

BLOCK, BATCH_SIZE = 32, 4


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of both scripts."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--eval-interval", type=int, default=5, help="default: %(default)s iterations")
    parser.add_argument("--accumulate", type=int, default=4, help="batches per update, default: %(default)s")
    parser.add_argument("--out", default="runs/nanogpt", help="for the file of tokens, and the best model")
    return parser


def write_tokens(path: Path) -> None:
    """A text as a file of tokens, written once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_name(f"{path.name}-{os.getpid()}")
        load_text().numpy().astype(np.uint16).tofile(begun)
        begun.replace(path)


def random_windows(path: Path, split: str) -> tuple[Tensor, Tensor]:
    """Tokens of random places in the file, and those that follow them, each of shape ``(batch, block)``."""
    all_tokens = np.memmap(path, dtype=np.uint16, mode="r")
    held_out = len(all_tokens) // 10
    tokens = all_tokens[:-held_out] if split == "train" else all_tokens[-held_out:]
    starts = torch.randint(len(tokens) - BLOCK, (BATCH_SIZE,))
    windows = torch.stack([torch.from_numpy(tokens[i : i + BLOCK + 1].astype(np.int64)) for i in starts])
    return windows[:, :-1], windows[:, 1:]


def cosine_rate(iterations: int, iteration: int) -> float:
    """After a warm-up of five iterations it falls to a tenth."""
    warm = min(1.0, (iteration + 1) / 5)
    decay = 0.5 * (1 + math.cos(math.pi * iteration / iterations))
    return 1e-3 * warm * (0.1 + 0.9 * decay)
