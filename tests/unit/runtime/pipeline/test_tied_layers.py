"""Which stages share a parameter, as the layers that share it move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from swift_ft.errors import UsageError
from swift_ft.runtime.pipeline.logged_pipeline import TiedLayers


class Ties:
    """Notes the stages of each pair that it was given last."""

    def __init__(self) -> None:
        self.stages: list[tuple[int, int]] = []

    def tie_layers(self, pairs: Any) -> None:
        self.stages = [(first[1], second[1]) for first, second in pairs]


def made() -> tuple[TiedLayers, Ties]:
    stack: Any = SimpleNamespace(
        count=6,
        begun=(2, 2, 2),
        cut_of=lambda layout: layout,
        layers=(0, 1),
        layer=lambda _: nn.Linear(2, 2),
        get_parameter=lambda _: None,
    )
    ties: Any = Ties()
    return TiedLayers(stack, ties), ties


def test_the_stages_of_the_present_layout() -> None:
    layers, ties = made()
    layers.tie("5.weight", "0.weight")
    layers.tie("1.bias", "2.bias")
    assert ties.stages == [(0, 2), (0, 1)]
    layers.place((3, 2, 1))
    assert ties.stages == [(0, 2), (0, 0)]


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("weight", "0.weight", "it takes the number of a layer, 0 to 5"),
        ("6.weight", "0.weight", "it takes the number of a layer, 0 to 5"),
        ("5", "0.weight", "and the name of a parameter in it"),
        ("0.logits", "5.weight", "layer 0 has no parameter 'logits'"),
        ("5.weight", "5.bias", "was given layer 5 twice"),
    ],
)
def test_misuse(first: str, second: str, why: str) -> None:
    layers, _ = made()
    with pytest.raises(UsageError, match=why):
        layers.tie(first, second)
