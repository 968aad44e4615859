"""Pipelines after a loss of nodes (Oobleck, SOSP '23, §5.1).

A pipeline that has lost nodes goes on with those that are left, if a template has that size. Otherwise it
borrows nodes from bigger pipelines, and where no pipeline can lend any, short pipelines merge. Templates have
all sizes from ``min_nodes`` up (§4.1.1), so any pipeline of at least ``min_nodes`` nodes has one.

In two cases the paper's steps would leave fewer than ``tolerate + 1`` pipelines although there are nodes
enough. Merging whole short pipelines can leave surplus nodes in each of them; here the rest of one goes on to
the next. And where whole pipelines are gone, new ones are made of borrowed nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
