"""The example of a stack of layers, each of them in a wrapper that computes its activations again."""

from __future__ import annotations

import train_elastic
from gpt import Config, build_layer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper


def wrapped(number: int, config: Config) -> nn.Module:
    layer: nn.Module = checkpoint_wrapper(
        build_layer(number, config), checkpoint_impl=CheckpointImpl.NO_REENTRANT
    )
    return layer


def main() -> None:
    vars(train_elastic)["build_layer"] = wrapped
    train_elastic.main()


if __name__ == "__main__":
    main()
