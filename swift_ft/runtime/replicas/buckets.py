"""Buckets for a transfer: small tensors of a dtype share one, and a large tensor has its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

import torch

LARGE_BYTES = 256 * 2**10
"""A tensor of this size travels by itself."""
_BUCKET_BYTES = 4 * 2**20

Key = TypeVar("Key", bound=Hashable)


def in_buckets(tensors: Mapping[Key, tuple[torch.dtype, int]]) -> Iterator[list[Key]]:
    """The keys of each bucket. Small tensors wait until theirs is full.

    Args:
        tensors: the dtype and the bytes of each, in the same order at both ends.
    """
    waiting: dict[torch.dtype, list[Key]] = {}
    filled = Counter[torch.dtype]()  # bytes
    for key, (dtype, nbytes) in tensors.items():
        if nbytes >= LARGE_BYTES:
            yield [key]
            continue
        waiting.setdefault(dtype, []).append(key)
        filled[dtype] += nbytes
        if filled[dtype] >= _BUCKET_BYTES:
            yield waiting.pop(dtype)
            filled[dtype] = 0
    yield from waiting.values()
