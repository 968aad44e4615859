"""Times of layers on equal devices, derived from measurements on unlike ones. Pure.

Layers with the same state and the same activations are alike: the blocks of a transformer, say. If those of
one device take longer than those of others, the device is slow, and not the layer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import median, median_low

from swift_ft.costs.layer_profile import LayerProfile

_ALIKE = 1.2
"""On one device, layers that are alike take at most so many times what the fastest of them takes."""


def on_equal_devices(layers: Sequence[LayerProfile], devices: Sequence[Hashable]) -> list[LayerProfile]:
    """The same layers with the times that a device like the others would take.

    Args:
        layers: as measured.
        devices: on which each was measured.
    """
    alike: dict[tuple[int, int], dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, (layer, device) in enumerate(zip(layers, devices, strict=True)):
        alike[layer.state_bytes, layer.activation_bytes][device].append(number)
    paces: dict[Hashable, list[float]] = defaultdict(list)
    for kind, by_device in alike.items():
        uniform = all(_uniform(layers, own) for own in by_device.values())
        if not all(kind) or len(by_device) < 2 or not uniform:
            continue
        times = {device: median(layers[n].compute_ns for n in own) for device, own in by_device.items()}
        usual = median_low(times.values())
        for device, time in times.items():
            paces[device].append(time / usual)
    return [
        layer.faster(median(paces[device])) if device in paces else layer
        for layer, device in zip(layers, devices, strict=True)
    ]


def measured_layers(
    published: Sequence[bytes], placed: Mapping[int, Sequence[int]]
) -> list[LayerProfile] | None:
    """The costs of a LayerStack's layers as on a device like most others; None until all are measured.

    Args:
        published: the measurements of workers, by rank.
        placed: the layers of each worker when they were measured.
    """
    owners = {layer: rank for rank, own in placed.items() for layer in own}
    found: dict[int, LayerProfile] = {}
    for text in published:
        for layers in json.loads(text).values():
            found |= {int(layer["name"]): LayerProfile(**layer) for layer in layers}
    if not owners or found.keys() != owners.keys():
        return None
    # Times were measured where the layers were (decision 21).
    numbers = sorted(owners)
    return on_equal_devices([found[n] for n in numbers], [owners[n] for n in numbers])


def _uniform(layers: Sequence[LayerProfile], own: Sequence[int]) -> bool:
    times = [layers[number].compute_ns for number in own]
    return 0 < max(times) <= _ALIKE * min(times)
