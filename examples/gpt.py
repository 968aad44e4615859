"""A byte-level GPT in pipeline stages, and the text it learns: the model of all examples.

The text is the English that every CPython carries (``pydoc_data.topics``, 460 kB): nothing is downloaded.
Everything is a pure function of its arguments: the weights of a layer depend on the seed and on the layer,
not on the number of stages or on the order of building; a batch depends on the seed and on the iteration.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes

ONE_STAGE = ("GPipe", "1F1B")  # per worker
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # of four, worker 1 has the stages 1 and 5
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # of four, worker 1 has the stages 1 and 6
SCHEDULES = (*ONE_STAGE, *LOOPED, *V_SHAPED)


@dataclass(frozen=True)
class Config:
    """The size of the model and of a batch. Every field is also an option of the example scripts."""

    layers: int = 8
    width: int = 192
    heads: int = 6
    sequence: int = 128
    microbatches: int = 8
    microbatch_size: int = 3
    dropout: float = 0.0
    seed: int = 0

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Config:
        """Picks the fields of a configuration out of parsed arguments."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all example scripts share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B", help="default: %(default)s")
    parser.add_argument("--weights-out", metavar="DIR", help="write the final weights as DIR/rank<r>.pt")
    model = parser.add_argument_group("model and data")
    for field in fields(Config):
        flag = "--" + field.name.replace("_", "-")
        model.add_argument(flag, type=type(field.default), default=field.default, help="default: %(default)s")
    return parser


class Embedding(nn.Module):
    """Bytes to vectors: ``(batch, sequence)`` of int64 to ``(batch, sequence, width)``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.sequence, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.token(tokens)
        return vectors + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """A pre-norm transformer block: ``(batch, sequence, width)`` to the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        attended: Tensor = self.out(mixed)
        return attended

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.dropout(self.attend(self.norm1(x)))
        x = x + attended
        up: Tensor = F.gelu(self.up(self.norm2(x)))
        down: Tensor = self.dropout(self.down(up))
        return x + down


class Head(nn.Module):
    """Vectors to the logits of the next byte: ``(batch, sequence, width)`` to ``(batch, sequence, 256)``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


def build_stage(stage_index: int, num_stages: int, config: Config) -> nn.Module:
    """Builds one pipeline stage, without building the others.

    Blocks are dealt to the stages in order, as evenly as possible; the embedding is on the first stage and
    the head on the last. The layers keep the names that they have in the whole model (``block5.qkv.weight``),
    so the state dicts of all stages together are the state dict of the model.

    Args:
        stage_index: which stage, from 0.
        num_stages: how many stages there are, at most one per block.
        config: sizes and seed of the model.

    Raises:
        ValueError: ``stage_index`` is out of range, or there are more stages than blocks.
    """
    if not 0 <= stage_index < num_stages <= config.layers:
        raise ValueError(f"stage {stage_index} of {num_stages} stages does not fit {config.layers} layers")
    first, end = (config.layers * index // num_stages for index in (stage_index, stage_index + 1))
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if stage_index == 0:
        layers["embedding"] = _build_layer(Embedding, 0, config)
    for index in range(first, end):
        layers[f"block{index}"] = _build_layer(Block, 1 + index, config)
    if stage_index == num_stages - 1:
        layers["head"] = _build_layer(Head, 1 + config.layers, config)
    return nn.Sequential(layers)


def build_layer(number: int, config: Config) -> nn.Module:
    """Builds a layer of the whole model: the embedding (0), a block, or the head (``config.layers + 1``)."""
    if number == 0:
        return _build_layer(Embedding, 0, config)
    return _build_layer(Block if number <= config.layers else Head, number, config)


def _build_layer(kind: Callable[[Config], nn.Module], position: int, config: Config) -> nn.Module:
    """Builds the layer at ``position`` with weights that depend on nothing but the seed and the position."""
    with torch.random.fork_rng(devices=[]):
        layer = kind(config)
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + position)
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
    return layer


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte; ``(batch, sequence, 256)`` against ``(batch, sequence)``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stages_of(schedule: str, rank: int, world_size: int) -> tuple[list[int], int]:
    """Returns the stages of a worker under one of torch's schedules, and the number of all stages."""
    if schedule in ONE_STAGE:
        return [rank], world_size
    second = 2 * world_size - 1 - rank if schedule in V_SHAPED else world_size + rank
    return [rank, second], 2 * world_size


def load_text() -> Tensor:
    """Returns the text of CPython's own help topics as one tensor of bytes, shape ``(length,)``, uint8."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Batches:
    """The training data, by iteration: ``batches[i]`` is the same batch whenever it is asked for.

    Args:
        config: the size of a batch, and the seed.
        device: of the batches.
    """

    def __init__(self, config: Config, device: torch.device | None = None) -> None:
        self._config = config
        self._device = device
        self._text = load_text()

    def __getitem__(self, iteration: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs and the targets (the next bytes) of one iteration.

        Both are int64, shape ``(microbatches * microbatch_size, sequence)``.
        """
        if iteration < 0:
            raise IndexError(f"iterations count from 0, not {iteration}")
        config = self._config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + iteration)
        last_start = len(self._text) - config.sequence - 1
        batch_size = config.microbatches * config.microbatch_size
        starts = torch.randint(last_start + 1, (batch_size, 1), generator=generator)
        windows = self._text[starts + torch.arange(config.sequence + 1)].long().to(self._device)
        return windows[:, :-1].contiguous(), windows[:, 1:]  # torch 2.11 takes no other input for a pipeline
