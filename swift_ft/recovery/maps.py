"""Persistent maps: sets of numbers, and maps without some of their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from immutables import Map

K = TypeVar("K")
V = TypeVar("V")

Numbers = Map[int, None]
"""A persistent set of ranks, or of slots."""


def kept(entries: Map[K, V], keep: Callable[[K, V], bool]) -> Map[K, V]:
    """A map without the entries that fail a test."""
    return without(entries, [key for key, value in entries.items() if not keep(key, value)])


def without(entries: Map[K, V], keys: Iterable[K]) -> Map[K, V]:
    """A map without some of its keys."""
    left = entries.mutate()
    for key in keys:
        del left[key]
    return left.finish()
