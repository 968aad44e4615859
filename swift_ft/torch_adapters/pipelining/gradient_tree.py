"""A sum over microbatches whose bits do not depend on who adds up which of them.

The terms are the leaves of a binary tree, by their global number. Two neighbours are added as soon as both
are there, and a node without a right neighbour goes up as it is. So a worker with consecutive leaves has few
nodes of the one tree, at most twice its depth, and the root is the same however the leaves were dealt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch


class Node(NamedTuple):
    """A node: the leaves ``number << level`` to ``((number + 1) << level) - 1``, as far as there are any."""

    level: int
    number: int


class GradientTree:
    """A sum that grows leaf by leaf, in any order.

    Args:
        leaves: of the whole tree, at least one.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._root = Node((leaves - 1).bit_length(), 0)
        self._nodes: dict[Node, Sequence[torch.Tensor]] = {}

    @property
    def nodes(self) -> Mapping[Node, Sequence[torch.Tensor]]:
        """What is there, ascending."""
        return {node: self._nodes[node] for node in sorted(self._nodes, key=lambda n: n.number << n.level)}

    @property
    def root(self) -> Sequence[torch.Tensor]:
        """The whole sum. All leaves are there."""
        return self._nodes[self._root]

    def add(self, node: Node, terms: Sequence[torch.Tensor]) -> None:
        """Add a node, or a leaf.

        Args:
            node: which is not there yet, nor a part of it.
            terms: one tensor for each sum. They belong to the tree from now on.
        """
        while node != self._root:
            parent = Node(node.level + 1, node.number // 2)
            if node.number % 2 == 0 and (node.number + 1) << node.level >= self._leaves:
                node = parent  # it has no right neighbour
                continue
            neighbour = self._nodes.pop(Node(node.level, node.number ^ 1), None)
            if neighbour is None:
                break
            left, right = (neighbour, terms) if node.number % 2 else (terms, neighbour)
            if terms:
                torch._foreach_add_([*left], [*right])
            terms = left
            node = parent
        self._nodes[node] = terms


def nodes_of(leaves: Iterable[int], total: int) -> list[Node]:
    """The nodes that some leaves of a tree add up to, ascending.

    Args:
        leaves: their numbers.
        total: of the whole tree.
    """
    tree = GradientTree(total)
    for leaf in leaves:
        tree.add(Node(0, leaf), ())
    return [*tree.nodes]
