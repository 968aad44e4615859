"""The bits of a sum do not depend on how its terms were dealt."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from swift_ft.torch_adapters.pipelining.layer_averages import GradientTree, Node, nodes_of


def terms(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(50, generator=generator) * 10.0 ** (n % 5) for n in range(count)]


def of_tree(count: int) -> torch.Tensor:
    tree = GradientTree(count)
    for leaf, term in enumerate(terms(count)):
        tree.add(Node(0, leaf), [term])
    (total,) = tree.root
    return total


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 31])
@pytest.mark.parametrize("seed", range(5))
def test_however_they_are_dealt(count: int, seed: int) -> None:
    draw, given = random.Random(seed), terms(count)
    ends = sorted({0, count, *(draw.randrange(count + 1) for _ in range(3))})
    whole = GradientTree(count)
    for first, end in draw.sample([*pairwise(ends)], len(ends) - 1):
        part = GradientTree(count)
        for leaf in draw.sample(range(first, end), end - first):
            part.add(Node(0, leaf), [given[leaf].clone()])
        assert [*part.nodes] == nodes_of(range(first, end), count)
        assert len(part.nodes) <= max(1, 2 * (count - 1).bit_length())
        for node, sums in part.nodes.items():
            whole.add(node, sums)
    (total,) = whole.root
    assert torch.equal(total, of_tree(count))


def test_the_order_of_a_chain_is_another_one() -> None:
    """Or the test above would prove nothing."""
    given = terms(16)
    *_, chain = accumulate(given)
    assert not torch.equal(chain, of_tree(16))
    assert torch.allclose(chain, of_tree(16))


def test_aligned_shares_are_one_node_each() -> None:
    assert nodes_of(range(8, 16), 16) == [Node(3, 1)]
    assert nodes_of(range(8), 16) == [Node(3, 0)]
    assert nodes_of(range(3, 11), 16) == [Node(0, 3), Node(2, 1), Node(1, 4), Node(0, 10)]
    assert nodes_of(range(4, 5), 5) == [Node(2, 1)]
