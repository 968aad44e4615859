"""Costs of a transformer's layers, from its shapes or from a few measured layers.

For plans before there is anything to measure on. A measurement of all layers is better
(``swift-run --layers-out``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swift_ft.costs.layer_profile import NANOSECONDS, LayerProfile
from swift_ft.errors import UsageError

_KEPT = 34
"""Bytes of activations per token and hidden unit that a block keeps in 16 bits, without attention scores."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """A transformer with an embedding, blocks that are alike, and a head.

    Attributes:
        hidden: width.
        blocks: how many.
        vocabulary: words.
        sequence: tokens of a sample.
        microbatch: samples of a microbatch.
        feed_forward: width of the two inner matrices of a block; None for four times ``hidden``.
        bytes_per_parameter: parameter, gradient and optimizer state: 16 for AdamW in mixed precision.
        tied: whether the head uses the embedding's weights.
    """

    hidden: int
    blocks: int
    vocabulary: int
    sequence: int
    microbatch: int = 1
    feed_forward: int | None = None
    bytes_per_parameter: int = 16
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "blocks", "vocabulary", "sequence", "microbatch", "bytes_per_parameter"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} is {getattr(self, name)}: it must be at least 1")

    @property
    def block_parameters(self) -> int:
        """Of one block, without biases and norms."""
        inner = 4 * self.hidden if self.feed_forward is None else self.feed_forward
        return 4 * self.hidden**2 + 2 * self.hidden * inner


def transformer_layers(
    shapes: Shapes, flops_per_s: float, blocks_ns: tuple[int, int] | None = None
) -> list[LayerProfile]:
    """The layers of a transformer: embedding, blocks, head.

    A matrix costs two operations per weight and token forward, twice as many backward; attention itself
    ``4 * sequence * hidden`` per token forward.

    Args:
        flops_per_s: that a device reaches.
        blocks_ns: forward and backward time of all blocks, where it was measured.

    Raises:
        UsageError: if the device computes nothing.
    """
    if not flops_per_s > 0:
        raise UsageError(f"the device reaches {flops_per_s:g} operations per second: it must be more than 0")
    tokens = shapes.sequence * shapes.microbatch
    words = shapes.vocabulary * shapes.hidden

    def time_ns(operations: int) -> int:
        return round(operations / flops_per_s * NANOSECONDS)

    one = time_ns(tokens * (2 * shapes.block_parameters + 4 * shapes.sequence * shapes.hidden))
    forward, backward = blocks_ns or (one * shapes.blocks, 2 * one * shapes.blocks)
    state = shapes.block_parameters * shapes.bytes_per_parameter
    head = time_ns(2 * tokens * words)
    table = words * shapes.bytes_per_parameter
    layers = [LayerProfile(0, 0, table, name="embedding")]
    for block in range(shapes.blocks):
        layers.append(
            LayerProfile(
                _share(forward, shapes.blocks, block),
                _share(backward, shapes.blocks, block),
                state,
                _KEPT * tokens * shapes.hidden,
                name=f"block {block}",
            )
        )
    shared = {"state_bytes": 0, "shared_with": 0} if shapes.tied else {"state_bytes": table}
    layers.append(
        LayerProfile(head, 2 * head, activation_bytes=4 * tokens * shapes.vocabulary, name="head", **shared)
    )
    return layers


def from_powers(count: int, measured_ns: Mapping[int, int]) -> int:
    """The time of some layers from those of powers of two of them (AutoHet, arXiv 2512.20953, §III).

    T(n) is the sum of T(2^i) over the binary digits of n, for models that do not fit into a machine as a
    whole. Beyond the largest power that was measured, that one counts as often as it is contained.

    Args:
        count: how many layers.
        measured_ns: by number of layers: 1, 2, 4 ... without a gap.

    Raises:
        UsageError: if a number is not a power of two, or one is missing.
    """
    powers = sorted(measured_ns, reverse=True)
    if not powers or powers != [1 << power for power in range(len(powers))][::-1]:
        given = ", ".join(map(str, sorted(measured_ns)))
        raise UsageError(f"layers were measured {given or 'never'} at a time: give 1, 2, 4 ... without a gap")
    total = 0
    for power in powers:
        times, count = divmod(count, power)
        total += times * measured_ns[power]
    return total


def _share(total: int, parts: int, part: int) -> int:
    """One of equal parts; the first ones take what is over."""
    return total // parts + (part < total % parts)
