"""A profile of layers as tensors, for moves: each layer's state is one row of bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.recovery.layout.tensors import StateTensor

_SHARED_OF_16 = {0: 0, 1: 12, 2: 14, 3: 16}
"""Of the 16 bytes per parameter of mixed-precision Adam, those that a stage of ZeRO shares."""


def layer_tensors(layers: Sequence[LayerProfile], zero: int = 0) -> list[StateTensor]:
    """The state of each layer that has any, cut by tensor parallelism, and held where a layer shares it.

    Args:
        layers: in order.
        zero: the stage of ZeRO. What it shares is cut by "ep" and "sp" too, as a tensor of its own.
    """
    users: dict[int, list[int]] = {index: [index] for index in range(len(layers))}
    for index, layer in enumerate(layers):
        if layer.shared_with is not None:
            users[layer.shared_with].append(index)
    tensors = []
    for index, layer in enumerate(layers):
        shared = layer.state_bytes * _SHARED_OF_16[zero] // 16
        used = tuple(users[index])
        if layer.state_bytes > shared:
            whole = (layer.state_bytes - shared,)
            tensors.append(StateTensor(f"layers.{index}", whole, 1, used, (("tp", 0),)))
        if shared:
            cut = (("tp", 0), ("ep", 0), ("sp", 0))
            tensors.append(StateTensor(f"layers.{index}:shared", (shared,), 1, used, cut))
    return tensors
