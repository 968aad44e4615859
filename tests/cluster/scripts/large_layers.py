"""``train_elastic`` whose two first layers have most of the state, and all others take most of the time."""

import importlib
import time

import gpt
import torch
from torch import nn

LARGE = 2
VALUES = 30_000_000
"""Of a parameter in each large layer: with its gradient and AdamW's state 480 MB."""
WAIT_S = 0.05

build_layer = gpt.build_layer


def build_unlike_layer(number: int, config: gpt.Config) -> nn.Module:
    layer = build_layer(number, config)
    if number < LARGE:
        layer.extra = nn.Parameter(torch.zeros(VALUES))
        layer.register_forward_hook(lambda module, _, output: output + module.extra.sum())
    else:
        layer.register_forward_hook(lambda *_: time.sleep(WAIT_S))
    return layer


def main() -> None:
    gpt.build_layer = build_unlike_layer
    importlib.import_module("train_elastic").main()


if __name__ == "__main__":
    main()
