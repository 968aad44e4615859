"""The machines that can be had: ``kinds.json``.

::

    {"kinds": [{"name": "A100", "most": 16, "price_per_hour": 4.1, "memory_bytes": 80e9},
               {"name": "H20", "most": 32, "price_per_hour": 1.9, "memory_bytes": 96e9, "speed": 0.48}]}

``speed`` is that of a device, as a share of the one that the layers were measured on. Besides: ``devices`` of
a machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift_ft.costs.json_files import load_object, read_text, whole
from swift_ft.errors import UsageError
from swift_ft.planning.layout.sizing import MachineKind

_NUMBERS = ("speed", "price_per_hour", "memory_bytes")
_COUNTS = ("most", "devices")
_LARGEST = 4096


def read_kinds(path: Path) -> list[MachineKind]:
    """The kinds in a file.

    Raises:
        UsageError: if it cannot be read, or describes none.
    """
    entries = load_object(read_text(path), str(path)).get("kinds")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path}: needs a list 'kinds' with at least one kind of machine")
    return [_kind(entry, f"{path}: kind {number}") for number, entry in enumerate(entries)]


def _kind(entry: Any, where: str) -> MachineKind:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is {entry!r}: it must be an object")
    known = ("name", *_COUNTS, *_NUMBERS)
    if unknown := sorted(entry.keys() - {*known}):
        raise UsageError(f"{where} has the unknown key {unknown[0]!r}: known are {', '.join(known)}")
    if not isinstance(entry.get("name"), str) or not entry["name"]:
        raise UsageError(f"{where} has no 'name'")
    values: dict[str, Any] = {"name": entry["name"]}
    for key in _COUNTS:
        value = whole(entry.get(key, 1 if key == "devices" else None))
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise UsageError(f"{where}: {key!r} is {value!r}: it must be a whole number from 1 to {_LARGEST}")
        values[key] = value
    for key in _NUMBERS:
        if key not in entry:
            continue
        value = entry[key]
        free = key == "price_per_hour"
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not (value >= 0 if free else value > 0) or value > 2**53:
            raise UsageError(f"{where}: {key!r} is {value!r}: it must be a positive number")
        values[key] = int(value) if key == "memory_bytes" else float(value)
    return MachineKind(**values)
