"""A profile of layers as tensors, for moves: each layer's state is one row of bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.recovery.layout.tensors import StateTensor


def layer_tensors(layers: Sequence[LayerProfile]) -> list[StateTensor]:
    """One tensor per layer that has state, cut by tensor parallelism, and held where a layer shares it."""
    users: dict[int, list[int]] = {index: [index] for index in range(len(layers))}
    for index, layer in enumerate(layers):
        if layer.shared_with is not None:
            users[layer.shared_with].append(index)
    return [
        StateTensor(f"layers.{index}", (layer.state_bytes,), 1, tuple(users[index]), (("tp", 0),))
        for index, layer in enumerate(layers)
        if layer.state_bytes
    ]
