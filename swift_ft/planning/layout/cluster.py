"""The devices that there are: ``cluster.json``, and what speed was measured. Pure, but for reading the file.

::

    {"nodes": [{"type": "A100", "devices": 4, "tflops": 312, "memory_bytes": 80e9},
               {"type": "H20", "devices": 8, "tflops": 148, "memory_bytes": 96e9, "speed": 0.7}],
     "link_bytes_per_s": 50e9}

``speed`` is measured, as a share of what the type does; a slow machine is a type of its own. Without
``link_bytes_per_s`` (between nodes) the time to average gradients is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_ft.costs.json_files import load_object, read_text, whole
from swift_ft.errors import UsageError

POWER_UNIT = 1_000_000
"""Whole units of power in a TFLOP/s."""

_NODE_KEYS = ("type", "devices", "tflops", "memory_bytes", "speed")
_MOST_DEVICES = 4_096
_STEPS = 20  # measured speeds are rounded down to 5 %, so that noise makes no types


@dataclass(frozen=True)
class Node:
    """Equal devices with a fast link.

    Attributes:
        kind: of its devices: the name of the type, with the share of its speed where that was measured.
        devices: how many.
        power: of one, in millionths of a TFLOP/s.
        memory_bytes: per device.
    """

    kind: str
    devices: int
    power: int
    memory_bytes: int


@dataclass(frozen=True)
class Cluster:
    """Nodes, and the bandwidth between them; None where it is not known."""

    nodes: tuple[Node, ...]
    link_bytes_per_s: int | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise UsageError("a cluster needs at least one node")
        facts: dict[str, tuple[int, int]] = {}
        for node in self.nodes:
            mine = (node.power, node.memory_bytes)
            if facts.setdefault(node.kind, mine) != mine:
                raise UsageError(f"devices of type {node.kind!r} differ: give another type or a 'speed'")

    def kinds(self) -> list[Node]:
        """One node of each kind, the weakest first."""
        first = {node.kind: node for node in reversed(self.nodes)}
        return sorted(first.values(), key=lambda node: (node.power, node.memory_bytes, node.kind))


def read_cluster(path: Path) -> Cluster:
    """The cluster in a file.

    Raises:
        UsageError: if it cannot be read, or is not a valid cluster.
    """
    return cluster_from_json(read_text(path), str(path))


def cluster_from_json(text: str, source: str = "cluster") -> Cluster:
    """The cluster in the text of a ``cluster.json``.

    Args:
        source: where it is from; errors begin with it.

    Raises:
        UsageError: if it is not a valid cluster.
    """
    data = load_object(text, source)
    entries = data.get("nodes")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{source}: needs a list 'nodes' with at least one node")
    nodes = tuple(_node(entry, f"{source}: node {i}") for i, entry in enumerate(entries))
    devices = sum(node.devices for node in nodes)
    if devices > _MOST_DEVICES:
        raise UsageError(f"{source}: {devices} devices are too many to plan for: {_MOST_DEVICES} at most")
    link = data.get("link_bytes_per_s")
    try:
        return Cluster(nodes, None if link is None else int(_positive(data, "link_bytes_per_s", source)))
    except UsageError as error:
        raise UsageError(f"{source}: {error}" if not str(error).startswith(source) else str(error)) from None


def _node(entry: Any, where: str) -> Node:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is {entry!r}: it must be an object")
    unknown = sorted(entry.keys() - set(_NODE_KEYS))
    if unknown:
        raise UsageError(f"{where} has the unknown key {unknown[0]!r}: known are {', '.join(_NODE_KEYS)}")
    kind, devices = entry.get("type"), whole(entry.get("devices"))
    if not isinstance(kind, str) or not kind:
        raise UsageError(f"{where} has no 'type': give it a name")
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= 1_000_000:
        raise UsageError(f"{where}: 'devices' is {devices!r}: it must be a number from 1 to 1000000")
    tflops = _positive(entry, "tflops", where)
    speed = _positive({"speed": 1, **entry}, "speed", where)
    steps = min(math.floor(speed * _STEPS + 1e-9), _STEPS)
    if steps < 1 or speed > 2:
        raise UsageError(f"{where}: 'speed' is {speed}: it must be a share of the type's, from 0.05 to 1")
    memory = math.floor(_positive(entry, "memory_bytes", where))
    name = kind if steps == _STEPS else f"{kind} at {steps / _STEPS:g}"
    return Node(name, devices, max(1, round(tflops * POWER_UNIT) * steps // _STEPS), memory)


def _positive(entry: dict[str, Any], key: str, where: str) -> float:
    value = entry.get(key)
    if value is None:
        raise UsageError(f"{where} has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 2**53:
        raise UsageError(f"{where}: {key!r} is {value!r}: it must be a positive number")
    return value
