"""Pipelines after a loss of nodes (Oobleck, SOSP '23, §5.1), and of other sizes after a gain.

A pipeline that has lost nodes goes on with those that are left, if a template has that size. Otherwise it
borrows nodes from bigger pipelines, and where no pipeline can lend any, short pipelines merge. Templates have
all sizes from ``min_nodes`` up (§4.1.1), so any pipeline of at least ``min_nodes`` nodes has one.

In two cases the paper's steps would leave fewer than ``tolerate + 1`` pipelines although there are nodes
enough. Merging whole short pipelines can leave surplus nodes in each of them; here the rest of one goes on to
the next. And where whole pipelines are gone, new ones are made of borrowed nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from swift_ft.errors import UsageError

Pipelines = tuple[tuple[int, ...], ...]
"""The nodes of each pipeline, in the order of its stages."""


def reconfigure(
    pipelines: Sequence[Sequence[int]], lost: Collection[int], *, min_nodes: int, tolerate: int = 0
) -> Pipelines:
    """The pipelines after a loss. All nodes that are left are used.

    Args:
        pipelines: the nodes of each.
        lost: nodes that are gone.
        min_nodes: the smallest template's.
        tolerate: losses to survive next: one pipeline more is kept, where there are nodes enough.

    Returns:
        Pipelines of at least ``min_nodes`` nodes, sorted by size and first node. At least ``tolerate + 1`` of
        them if at least ``(tolerate + 1) * min_nodes`` nodes are left.

    Raises:
        UsageError: if fewer than ``min_nodes`` nodes are left, or the input makes no sense.
    """
    check_pipelines(pipelines, min_nodes)
    unknown = sorted(set(lost) - {node for pipeline in pipelines for node in pipeline})
    if unknown:
        raise UsageError(f"node {unknown[0]} is lost and in no pipeline: name nodes of the pipelines only")
    left = [[node for node in pipeline if node not in lost] for pipeline in pipelines]
    left = [pipeline for pipeline in left if pipeline]
    total = sum(map(len, left))
    if total < min_nodes:
        raise UsageError(
            f"{total} nodes are left and the smallest pipeline needs {min_nodes}: "
            f"{min_nodes - total} more would do"
        )
    for pipeline in left:
        _borrow(pipeline, left, min_nodes)
    merged = _merge(left, min_nodes)
    while len(merged) <= tolerate and total >= (len(merged) + 1) * min_nodes:
        new: list[int] = []
        _borrow(new, merged, min_nodes)
        merged.append(new)
    return in_order(merged)


def in_order(pipelines: Sequence[Sequence[int]]) -> Pipelines:
    """Pipelines sorted by size and first node."""
    return tuple(
        sorted((tuple(pipeline) for pipeline in pipelines), key=lambda nodes: (len(nodes), nodes[:1]))
    )


def check_pipelines(pipelines: Sequence[Sequence[int]], min_nodes: int) -> None:
    """Check that pipelines can be told apart.

    Raises:
        UsageError: if a node is in two of them, there is none, or ``min_nodes`` is not positive.
    """
    if min_nodes < 1:
        raise UsageError(f"the smallest pipeline has {min_nodes} nodes: it must have at least 1")
    seen: set[int] = set()
    for pipeline in pipelines:
        for node in pipeline:
            if node in seen:
                raise UsageError(f"node {node} is in the pipelines twice: each node has one place")
            seen.add(node)
    if not seen:
        raise UsageError("there are no pipelines: give the nodes of at least one")


def _borrow(short: list[int], pipelines: Sequence[list[int]], min_nodes: int) -> None:
    """Take nodes one by one from the biggest pipeline, the last among equals, its last node first."""
    while len(short) < min_nodes:
        size, position = max((len(pipeline), position) for position, pipeline in enumerate(pipelines))
        if size <= min_nodes:
            return
        short.append(pipelines[position].pop())


def _merge(pipelines: Sequence[list[int]], min_nodes: int) -> list[list[int]]:
    """Join short pipelines, in order, as soon as they are long enough; what is over joins the last of these.

    Only called where no pipeline can lend a node, so those that are not short have ``min_nodes`` nodes.
    """
    whole = [pipeline for pipeline in pipelines if len(pipeline) >= min_nodes]
    over = [node for pipeline in pipelines if len(pipeline) < min_nodes for node in pipeline]
    joined = [over[start : start + min_nodes] for start in range(0, len(over) - min_nodes + 1, min_nodes)]
    rest = over[len(joined) * min_nodes :]
    if joined:
        joined[-1].extend(rest)
    elif rest:
        whole[0] = rest + whole[0]
    return whole + joined


# Pipelines of other sizes from those that there are: after nodes were added, or to balance what losses
# left.
#
# Oobleck has no algorithm for nodes that are added. Which sizes are best is a prediction
# (``planning/layout/instantiate.py``). Which nodes form them is decided here, so that as few nodes as
# possible come to another pipeline, and as many pipelines as possible keep their nodes.


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
    """The number of nodes that change their pipeline. Of each old pipeline, one set may stay together.

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
