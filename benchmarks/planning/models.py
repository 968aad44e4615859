"""The state of transformers as tensors, with what AdamW keeps in 32 bits: 14 bytes per parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swift_ft.recovery.layout.tensors import StateTensor, kept_for

Split = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Transformer:
    """Shapes of a model.

    Attributes:
        name: as its makers say.
        layers: blocks.
        width: of the residual stream.
        feed_forward: inner width of a block.
        keys: width of keys, and of values; with grouped queries less than ``width``.
        vocabulary: 0 without an embedding.
        gated: whether a block has a third inner matrix, no biases, and norms of one vector (LLaMA).
        tied: whether the head is the embedding.
    """

    name: str
    layers: int
    width: int
    feed_forward: int
    keys: int
    vocabulary: int = 0
    gated: bool = False
    tied: bool = True

    def tensors(self, *, shared: Split = (), optimizer_shared: Split | None = None) -> list[StateTensor]:
        """Parameters in 16 bits, and AdamW's averages and a copy of the weights in 32.

        Args:
            shared: how replicas share state, as FSDP does: ``(("dp", 0),)``.
            optimizer_shared: the same of the optimizer's state; None for as the parameters.
        """
        of_optimizer = shared if optimizer_shared is None else optimizer_shared
        found = []
        for name, shape, split, layers in self._parameters():
            parameter = StateTensor(name, shape, 2, layers, (*shared, *split))
            found.append(parameter)
            apart = StateTensor(name, shape, 2, layers, (*of_optimizer, *split))
            found += [kept_for(apart, key, shape, 4) for key in ("exp_avg", "exp_avg_sq", "weight")]
            found.append(kept_for(apart, "step", (), 4))
        return found

    def _parameters(self) -> Iterator[tuple[str, tuple[int, ...], Split, tuple[int, ...]]]:
        if self.vocabulary:
            table = (self.vocabulary, self.width)
            last = self.layers - 1
            yield "embedding", table, (("tp", 0),), (0, last) if self.tied else (0,)
            if not self.tied:
                yield "head", table, (("tp", 0),), (last,)
        for layer in range(self.layers):
            for name, shape, split in self._block():
                yield f"layers.{layer}.{name}", shape, split, (layer,)

    def _block(self) -> Iterator[tuple[str, tuple[int, ...], Split]]:
        inner = ("mlp.gate", "mlp.in") if self.gated else ("mlp.in",)
        for name, shape, dimension in (
            ("attention.in", (self.width + 2 * self.keys, self.width), 0),
            ("attention.out", (self.width, self.width), 1),
            *((name, (self.feed_forward, self.width), 0) for name in inner),
            ("mlp.out", (self.width, self.feed_forward), 1),
        ):
            yield f"{name}.weight", shape, (("tp", dimension),)
            if not self.gated:
                yield f"{name}.bias", shape[:1], (("tp", 0),) if dimension == 0 else ()
        for norm in ("norm1", "norm2"):
            yield f"{norm}.weight", (self.width,), ()
            if not self.gated:
                yield f"{norm}.bias", (self.width,), ()


def gpt(name: str, layers: int, width: int, vocabulary: int = 50_257) -> Transformer:
    """A model with the shapes of GPT-3 (Brown et al. 2020, table 2.1), its embedding tied."""
    return Transformer(name, layers, width, 4 * width, width, vocabulary)


LLAMA_70B = Transformer("LLaMA 70B", 80, 8192, 28_672, 1024, 128_256, gated=True, tied=False)
"""70.6 billion parameters: eight heads of keys and values, 80 blocks (the shapes of Llama 3)."""
