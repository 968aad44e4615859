"""All sets of pipelines that use some nodes, one by one: what the planner only counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def node_sets(sizes: Sequence[int], nodes: int, fewest: int) -> Iterator[tuple[int, ...]]:
    """All sets that ``count_sets`` counts, each ascending."""
    ascending = sorted(sizes)

    def grow(rest: int, start: int, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not rest and len(taken) >= fewest:
            yield taken
        for index in range(start, len(ascending)):
            size = ascending[index]
            if size > rest or len(taken) + rest // size < fewest:
                return
            yield from grow(rest - size, index, (*taken, size))

    return grow(nodes, 0, ())
