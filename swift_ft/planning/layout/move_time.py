"""The least time that the moves between two layouts take, by the speeds of links. Pure.

All pieces move at once, each link in both directions. The busiest link decides. Memory that must be
allocated, process groups that must be formed, latency and other traffic are not in it: a real change takes
longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from swift_ft.errors import UsageError
from swift_ft.recovery.moves.plan import MovePlan
from swift_ft.recovery.moves.sources import Location


@dataclass(frozen=True, slots=True)
class Links:
    """Speeds in bytes per second, in each direction.

    Attributes:
        inside: between a device and the others of its node.
        between: one network adapter's speed to other nodes.
        adapters: each node's number. Its devices are dealt to them evenly, in order.
    """

    inside: float
    between: float
    adapters: int = 1

    def __post_init__(self) -> None:
        if not (self.inside > 0 and self.between > 0 and self.adapters >= 1):
            raise UsageError(f"{self}: links need speeds above zero, and at least one adapter")


@dataclass(frozen=True, slots=True)
class MoveTime:
    """Seconds of a change.

    Attributes:
        inside_s: the busiest device's link inside its node.
        between_s: the busiest adapter's.
    """

    inside_s: float
    between_s: float

    @property
    def seconds(self) -> float:
        """Of both at once."""
        return max(self.inside_s, self.between_s)


def move_time(plan: MovePlan, locations: Mapping[int, Location], links: Links) -> MoveTime:
    """The least time of a plan, without what comes from a checkpoint.

    Args:
        plan: what moves.
        locations: of all devices; the whole location names the node.
        links: their speeds.

    Raises:
        UsageError: if a device has no location.
    """
    adapter_of = _adapters(locations, links.adapters)
    inside: Counter[Hashable] = Counter()
    between: Counter[Hashable] = Counter()
    for move in plan.moves:
        if move.source is None:
            continue
        for device in (move.source, move.target):
            if device not in locations:
                raise UsageError(f"device {device} has no location: say where each device is")
        near = locations[move.source] == locations[move.target]
        load, end = (inside, _itself) if near else (between, adapter_of.__getitem__)
        load["from", end(move.source)] += move.nbytes
        load["to", end(move.target)] += move.nbytes
    return MoveTime(
        max(inside.values(), default=0) / links.inside, max(between.values(), default=0) / links.between
    )


def _itself(device: int) -> Hashable:
    return device


def _adapters(locations: Mapping[int, Location], adapters: int) -> dict[int, Hashable]:
    """The node and the number of the adapter of each device."""
    at: dict[Location, list[int]] = {}
    for device in sorted(locations):
        at.setdefault(locations[device], []).append(device)
    return {
        device: (node, place * adapters // len(devices))
        for node, devices in at.items()
        for place, device in enumerate(devices)
    }
