"""Costs of each layer of a model (time, state, activations), and the file that people write.

``layers.json``, in the model's order::

    {"layers": [{"name": "embedding", "forward_s": 0.001, "backward_s": 0.002, "state_bytes": 400000000},
                {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 2e8, "activation_bytes": 5e7},
                {"forward_s": 0.004, "backward_s": 0.008, "state_bytes": 0, "shared": "embedding"}]}

Inside, times are whole nanoseconds and sizes whole bytes: all machines compute the same plan from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift_ft.costs.json_files import load_object, read_text, whole, write_text
from swift_ft.errors import UsageError

NANOSECONDS = 1_000_000_000
"""In a second."""

_MOST = 2**53  # ns (104 days) and bytes (9 PB): sums of 1,000 layers stay exact in 64 bits
_KEYS = ("name", "forward_s", "backward_s", "state_bytes", "activation_bytes", "shared")


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer, for one microbatch, on one device.

    Attributes:
        forward_ns: time of its forward pass.
        backward_ns: time of its backward pass, weights included.
        state_bytes: its parameters, gradients and optimizer state; without what it shares.
        activation_bytes: what a microbatch keeps from its forward to its backward pass.
        shared_with: an earlier layer, by index, whose state this one uses too (tied embeddings); None
            without. A stage that has this layer and not the other holds a copy of the other's state.
        name: for people; may be empty.
    """

    forward_ns: int
    backward_ns: int
    state_bytes: int
    activation_bytes: int = 0
    shared_with: int | None = None
    name: str = ""

    @property
    def compute_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns

    def faster(self, by: float) -> LayerProfile:
        """The layer on a device that takes its time divided by this factor."""
        forward, backward = (round(time / by) for time in (self.forward_ns, self.backward_ns))
        return replace(self, forward_ns=forward, backward_ns=backward)


def layers_from_json(text: str, source: str = "layers") -> tuple[LayerProfile, ...]:
    """The layers in the text of a ``layers.json``.

    Args:
        source: where it is from; errors begin with it.

    Raises:
        UsageError: if it is not a valid profile.
    """
    entries = load_object(text, source).get("layers")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{source}: needs a list 'layers' with at least one layer")
    layers: list[LayerProfile] = []
    for index, entry in enumerate(entries):
        where = f"{source}: layer {index}"
        if not isinstance(entry, dict):
            raise UsageError(f"{where} is {entry!r}: it must be an object")
        unknown = sorted(entry.keys() - set(_KEYS))
        if unknown:
            raise UsageError(f"{where} has the unknown key {unknown[0]!r}: known are {', '.join(_KEYS)}")
        layers.append(_layer(entry, layers, where))
    if not any(layer.compute_ns for layer in layers):
        raise UsageError(f"{source}: no layer takes any time: at least one must")
    return tuple(layers)


def _layer(entry: dict[str, Any], before: Sequence[LayerProfile], where: str) -> LayerProfile:
    name = entry.get("name", "")
    if not isinstance(name, str):
        raise UsageError(f"{where}: 'name' is {name!r}: it must be a text")
    if name and name in (layer.name for layer in before):
        raise UsageError(f"{where}: there is a layer {name!r} already: names must differ")
    return LayerProfile(
        forward_ns=round(_number(entry, "forward_s", where, NANOSECONDS) * NANOSECONDS),
        backward_ns=round(_number(entry, "backward_s", where, NANOSECONDS) * NANOSECONDS),
        state_bytes=_bytes(entry, "state_bytes", where),
        activation_bytes=_bytes({"activation_bytes": 0, **entry}, "activation_bytes", where),
        shared_with=_shared(entry.get("shared"), before, where),
        name=name,
    )


def _number(entry: dict[str, Any], key: str, where: str, per_unit: int = 1) -> float:
    value = entry.get(key)
    if value is None:
        raise UsageError(f"{where} has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        raise UsageError(f"{where}: {key!r} is {value!r}: it must be a finite number")
    if not 0 <= value * per_unit <= _MOST:
        raise UsageError(f"{where}: {key!r} is {value}: it must be between 0 and {_MOST / per_unit:.3g}")
    return value


def _bytes(entry: dict[str, Any], key: str, where: str) -> int:
    value = whole(_number(entry, key, where))
    if not isinstance(value, int):
        raise UsageError(f"{where}: {key!r} is {value}: it must be a whole number of bytes")
    return value


def _shared(value: Any, before: Sequence[LayerProfile], where: str) -> int | None:
    if value is None:
        return None
    names = {layer.name: index for index, layer in enumerate(before) if layer.name}
    if isinstance(value, str) and value in names:
        return names[value]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(before):
        return value
    raise UsageError(f"{where}: 'shared' is {value!r}: it must be the name or the index of an earlier layer")


def layers_to_json(layers: Sequence[LayerProfile]) -> str:
    """The text of a ``layers.json``."""
    entries: list[dict[str, Any]] = []
    for layer in layers:
        entry: dict[str, Any] = {"name": layer.name} if layer.name else {}
        entry["forward_s"] = layer.forward_ns / NANOSECONDS
        entry["backward_s"] = layer.backward_ns / NANOSECONDS
        entry["state_bytes"] = layer.state_bytes
        if layer.activation_bytes:
            entry["activation_bytes"] = layer.activation_bytes
        if layer.shared_with is not None:
            entry["shared"] = layer.shared_with
        entries.append(entry)
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return f'{{"layers": [\n{lines}\n]}}\n'


def read_layers(path: Path) -> tuple[LayerProfile, ...]:
    """The layers in a file.

    Raises:
        UsageError: if it cannot be read, or is not a valid profile.
    """
    return layers_from_json(read_text(path), str(path))


def write_layers(layers: Sequence[LayerProfile], path: Path) -> None:
    """Write a ``layers.json``.

    Raises:
        UsageError: if the file cannot be written.
    """
    write_text(path, layers_to_json(layers))


def copies_bytes(layers: Sequence[LayerProfile], first: int, end: int) -> int:
    """Copies that a stage of layers ``first`` to ``end - 1`` has of state shared with other stages."""
    others = {layers[layer].shared_with for layer in range(first, end)}
    copies = {other for other in others if other is not None and not first <= other < end}
    return sum(layers[other].state_bytes for other in copies)
