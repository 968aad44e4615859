"""The sender of each slice: the nearest holder, or of equally near ones the one that has sent least. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import heapify, heapreplace

Location = tuple[int, ...]
"""The place of a device, outermost level first: ``(rack, machine)``."""


def distance(one: Location, other: Location) -> int:
    """Levels that two devices do not share: 0 on one machine, 1 in one rack, 2 beyond it."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    depth = max(len(one), len(other))
    return depth - (min(len(one), len(other)) if shared is None else shared)


class Sources:
    """Chooses senders one by one, and counts what each has sent.

    Args:
        locations: of all devices; one without a location is far from all others.
    """

    def __init__(self, locations: Mapping[int, Location]) -> None:
        self._locations = locations
        self._sent: Counter[int] = Counter()
        self._heaps: dict[int, tuple[tuple[int, ...], dict[Location, list[tuple[int, int]]]]] = {}

    def choose(self, holders: tuple[int, ...], target: int, nbytes: int) -> int | None:
        """The holder that sends to a target; None if there is no holder.

        Args:
            holders: devices that have the bytes. Their heaps are kept for this very object.
            target: the device that lacks them.
            nbytes: how many.
        """
        if id(holders) not in self._heaps:
            self._heaps[id(holders)] = (holders, self._by_place(holders))
        heaps, place = self._heaps[id(holders)][1], self._locations.get(target, ())
        for depth in range(len(place), -1, -1):
            if heap := heaps.get(place[:depth]):
                break
        else:
            return None
        while heap[0][0] != self._sent[heap[0][1]]:  # it has sent more since, from another heap
            heapreplace(heap, (self._sent[heap[0][1]], heap[0][1]))
        device = heap[0][1]
        self._sent[device] += nbytes
        heapreplace(heap, (self._sent[device], device))
        return device

    def _by_place(self, holders: tuple[int, ...]) -> dict[Location, list[tuple[int, int]]]:
        """The holders below each node of the tree of places, each as (bytes sent, device)."""
        heaps: dict[Location, list[tuple[int, int]]] = {}
        for device in holders:
            place = self._locations.get(device, ())
            for depth in range(len(place) + 1):
                heaps.setdefault(place[:depth], []).append((self._sent[device], device))
        for heap in heaps.values():
            heapify(heap)
        return heaps
