"""A small Llama in pipeline stages: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.config import Model

VOCABULARY = 256  # bytes


def rotate(x: Tensor) -> Tensor:
    """RoPE: positions turn pairs of numbers; ``(batch, heads, sequence, head)`` to the same."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    first, second = x.float().chunk(2, dim=-1)
    turned = (
        first * angles.cos() - second * angles.sin(),
        first * angles.sin() + second * angles.cos(),
    )
    return torch.cat(turned, dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal attention in which several heads share a key."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.head, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(config.heads * self.head, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in self.projected(x))
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.wq(x), self.wk(x), self.wv(x)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, 3 * config.width, bias=False)
        self.w2 = nn.Linear(3 * config.width, config.width, bias=False)
        self.w3 = nn.Linear(config.width, 3 * config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Layer(nn.Module):
    """A pre-norm transformer block: ``(batch, sequence, width)`` to the same."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(self.attention_norm(x))
        x = x + attended
        fed: Tensor = self.feed_forward(self.ffn_norm(x))
        return x + fed


class Stage(nn.Module):
    """Some of the layers, under the names that they have in the whole model."""

    def __init__(self, config: Model, index: int, num_stages: int) -> None:
        super().__init__()
        first, end = (config.layers * edge // num_stages for edge in (index, index + 1))
        self.tok_embeddings = nn.Embedding(VOCABULARY, config.width) if index == 0 else None
        self.layers = nn.ModuleDict({str(number): Layer(config) for number in range(first, end)})
        self.norm = nn.RMSNorm(config.width) if index == num_stages - 1 else None
        self.output = nn.Linear(config.width, VOCABULARY, bias=False) if index == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before has sent, to what the next one gets, or logits."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x


def build_stage(config: Model, index: int, num_stages: int, seed: int) -> Stage:
    """A stage whose weights depend on the seed and on their names, not on the number of stages."""
    stage = Stage(config, index, num_stages)
    for name, parameter in stage.named_parameters():
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed(seed + sum(name.encode()) * 1_000_003)
            nn.init.normal_(parameter, std=0.05, generator=generator)
    return stage


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
