"""Pipelines of other sizes from those that there are: after nodes were added, or to balance what losses left.

Oobleck has no algorithm for nodes that are added. Which sizes are best is a prediction
(``planning/layout/instantiate.py``). Which nodes form them is decided here, so that as few nodes as possible
come to another pipeline, and as many pipelines as possible keep their nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.losses import Pipelines, check_pipelines, in_order


def reform(pipelines: Sequence[Sequence[int]], sizes: Sequence[int], added: Iterable[int] = ()) -> Pipelines:
    """Pipelines of given sizes, of all nodes.

    A pipeline whose size stays keeps its nodes. The others are matched by size, the biggest with the biggest;
    a pipeline that shrinks gives its last nodes first, and one that grows keeps all.

    Args:
        pipelines: the nodes of each.
        sizes: that are wanted, in any order.
        added: new nodes.

    Returns:
        Sorted by size and first node.

    Raises:
        UsageError: if the sizes do not use all nodes exactly, or a node is there twice.
    """
    new = sorted(added)
    check_pipelines([*pipelines, *([new] if new else [])], min_nodes=1)
    nodes = sum(map(len, pipelines)) + len(new)
    if sum(sizes) != nodes or min(sizes, default=0) < 1:
        raise UsageError(
            f"pipelines of {', '.join(map(str, sizes))} nodes do not use {nodes} nodes exactly: their sizes "
            f"add up to {sum(sizes)}"
        )
    wanted = Counter(sizes)
    formed: list[list[int]] = []
    changing: list[list[int]] = []
    for pipeline in sorted(map(list, pipelines), key=lambda nodes: (-len(nodes), nodes[:1])):
        if wanted[len(pipeline)]:
            wanted[len(pipeline)] -= 1
            formed.append(pipeline)
        else:
            changing.append(pipeline)
    targets = sorted(wanted.elements(), reverse=True)
    changing += [[] for _ in range(len(targets) - len(changing))]
    targets += [0] * (len(changing) - len(targets))
    free = [node for one, size in zip(changing, targets, strict=True) for node in reversed(one[size:])] + new
    for one, size in zip(changing, targets, strict=True):
        kept = one[:size]
        missing = size - len(kept)
        formed.append([*kept, *free[:missing]])
        free = free[missing:]
    return in_order([one for one in formed if one])


def moved(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> int:
    """How many nodes come to another pipeline: all of a pipeline but those that stay together in one.

    New nodes do not count: they have to load whatever they are given.
    """
    place = {node: number for number, nodes in enumerate(before) for node in nodes}
    together = Counter(
        (place[node], number) for number, nodes in enumerate(after) for node in nodes if node in place
    )
    best: dict[int, int] = {}
    taken: set[int] = set()
    for (old, number), count in sorted(together.items(), key=lambda entry: (-entry[1], entry[0])):
        if old not in best and number not in taken:
            best[old] = count
            taken.add(number)
    return sum(len(nodes) for nodes in before) - sum(best.values())
