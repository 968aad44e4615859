"""How a cost grows with the size of a job: the exponent of a power law through measured points. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PowerLaw:
    """``cost = factor * size ** exponent``.

    Attributes:
        factor: the cost at size 1.
        exponent: 1 for a cost in proportion to the size, 2 for one that grows with its square.
    """

    factor: float
    exponent: float

    def at(self, size: float) -> float:
        """The cost at a size."""
        return float(self.factor * size**self.exponent)


def fit(costs: Mapping[int, float]) -> PowerLaw:
    """The power law that is nearest to measured costs, by least squares of their logarithms.

    Args:
        costs: by size; at least two sizes, and all of them positive.

    Raises:
        ValueError: there are too few sizes, or a cost is not positive.
    """
    if len(costs) < 2:
        raise ValueError(f"A growth needs at least two sizes, not {len(costs)}.")
    if bad := [size for size, cost in costs.items() if cost <= 0 or size <= 0]:
        raise ValueError(f"Sizes and their costs must be positive; those of {bad} are not.")
    points = [(math.log(size), math.log(cost)) for size, cost in costs.items()]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    exponent = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return PowerLaw(math.exp(mean_y - exponent * mean_x), exponent)
