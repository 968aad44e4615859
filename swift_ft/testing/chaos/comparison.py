"""Digests of what a run left in its store, by which two runs are compared."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.state_payload import unpack
from swift_ft.storage.store import Store


def last_state(url: str) -> dict[str, str]:
    """A digest of each value in the last checkpoint of a store, by rank and name. Empty without a checkpoint.

    The random state of the process is left out: a script need not seed what it does not use, and steps have
    random state of their own.
    """
    folder = CheckpointFolder(Store(url))
    if not (committed := folder.committed()):
        return {}
    found = {"iteration": str(committed[-1])}
    for rank, part in sorted(folder.parts_of(committed[-1]).items()):
        state = folder.reader(part).read()
        for name, value in _leaves(state):
            found[f"worker {rank}{name}"] = xxhash.xxh3_128_hexdigest(_bytes_of(value))
    return found


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, io.BytesIO):
        plain = unpack(value.getvalue())
        plain["small"].pop("random", None)
        yield from _leaves(plain, name)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, Sequence | deque) and not isinstance(value, str | bytes):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{index}")
    else:
        yield name, value


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return bytes(value.reshape(-1).view(torch.uint8).numpy())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    shown = sorted(map(repr, value)) if isinstance(value, set | frozenset) else value  # a set has no order
    return repr(shown).encode()
