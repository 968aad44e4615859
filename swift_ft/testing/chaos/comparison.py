"""Digests of all that a run has computed: its last checkpoint, and the files that its script wrote."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.state_payload import unpack
from swift_ft.errors import SwiftError
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.store import Store
from swift_ft.testing.chaos.run_folder import OWN, store_in
from swift_ft.testing.chaos.values import digests, leaves

UNDO_BOUND = 1e-5
"""The largest difference after an undo that is not exact, relative to the largest element of its tensor.

The undo itself errs by a few units in the last place (docs/undo.md), and the iterations that follow go on
from there.
"""


def files_of(folder: Path) -> dict[str, str]:
    """A digest of each file that a script wrote into its run's folder, except those of the store."""
    store = store_in(folder)
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        is_ours = inside.parts[0] == OWN or (store is not None and path.is_relative_to(store))
        if path.is_file() and not is_ours and "__pycache__" not in inside.parts:
            found[f"file {inside}"] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    return found


def last_state(url: str) -> dict[str, str]:
    """A digest of each value in the last checkpoint of a store, by rank and name. Empty without a checkpoint.

    The random state of the process is left out: a script need not seed what it does not use, and steps have
    random state of their own.
    """
    folder = CheckpointFolder(Store(url))
    if not (committed := folder.committed()):
        return {}
    return {"iteration": str(committed[-1]), **digests(_values(folder, committed[-1]))}


def loads(url: str) -> bool:
    """Whether any committed checkpoint of a store can be read, all parts of it."""
    folder = CheckpointFolder(Store(url))
    for iteration in reversed(folder.committed()):
        try:
            for _ in _values(folder, iteration):
                pass
        except SwiftError:
            continue
        return True
    return False


def largest_difference(url: str, other_url: str, names: Sequence[str]) -> float:
    """The largest difference of values of two last checkpoints, relative to their tensor's largest element.

    It is infinite where one is missing, or has no numbers.
    """
    ours, theirs = dict(_last_values(url)), dict(_last_values(other_url))
    return max((_difference(ours.get(name), theirs.get(name)) for name in names), default=0.0)


def _difference(one: Any, other: Any) -> float:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if not tensors or one.layout != other.layout or one.layout != torch.strided:
        return math.inf
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return math.inf
    if not one.numel():
        return 0.0
    scale = max(one.abs().max().item(), other.abs().max().item())
    difference = (one.double() - other.double()).abs().max().item()
    relative = difference / scale if scale else 0.0
    return relative if math.isfinite(relative) else math.inf  # NaN is neither larger nor smaller than a bound


def _last_values(url: str) -> Iterator[tuple[str, Any]]:
    folder = CheckpointFolder(Store(url))
    if committed := folder.committed():
        yield from _values(folder, committed[-1])


def _values(folder: CheckpointFolder, iteration: int) -> Iterator[tuple[str, Any]]:
    """Each value that was saved. Replicas share one part: it is that of the first of them."""
    parts: dict[str, tuple[int, SavedPart]] = {}
    for rank, part in sorted(folder.parts_of(iteration).items()):
        parts.setdefault(part.path, (rank, part))
    for rank, part in parts.values():
        yield from leaves(_opened(folder.reader(part).read()), f"worker {rank}")


def _opened(part: Any) -> Any:
    """A part with the plain values that are packed in it, but for the random state of the process.

    And but for what was there before the lines at the top of an epoch: all that follows from it is compared.
    """
    if isinstance(part, Mapping):
        return {key: _opened(value) for key, value in part.items()}
    if not isinstance(part, io.BytesIO):
        return part
    plain = unpack(part.getvalue())
    plain["small"].pop("random", None)
    plain["small"].get("parts", {}).get("swift_ft.epochs", {}).pop("top", None)
    return plain
