"""The plan of pipelines that follow a loss: it deals all layers and the whole batch, by what layers cost."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from swift_ft.config.run_plan import plan_from_json
from swift_ft.costs.equal_devices import measured_layers
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.survivors_plan import plan_after_loss
from swift_ft.recovery.next_pipelines import Sizes, is_plan_for

EQUAL = LayerProfile(1000, 2000, 8)


def test_layers_and_microbatches_go_where_there_is_time() -> None:
    plan = plan_after_loss((2, 3), Sizes(10, 16), unlike=True)
    assert [pipeline.cut for pipeline in plan.pipelines] == [(5, 5), (3, 3, 4)]
    assert plan.microbatches == (7, 9)


def test_a_dear_layer_has_a_stage_of_its_own() -> None:
    layers = [LayerProfile(9000, 18000, 8), *[EQUAL] * 9]
    plan = plan_after_loss((2, 3), Sizes(10, 16), layers, unlike=True)
    assert [pipeline.cut for pipeline in plan.pipelines] == [(1, 9), (1, 4, 5)]


def test_no_cut_is_changed_for_noise() -> None:
    layers = [LayerProfile(1000 + number, 2000, 8) for number in range(10)]
    assert plan_after_loss((2, 3), Sizes(10, 16), layers, unlike=True) == plan_after_loss(
        (2, 3), Sizes(10, 16), unlike=True
    )


def test_1f1b_gets_as_many_microbatches_as_it_has_stages() -> None:
    assert plan_after_loss((1, 4), Sizes(10, 8), unlike=True).microbatches == (4, 4)
    assert sum(plan_after_loss((1, 6), Sizes(10, 8), unlike=True).microbatches) == 8  # others take any number


def test_batches_that_do_not_follow_have_equally_many_microbatches() -> None:
    """The script gives each pipeline an equal part of the batch."""
    layers = [LayerProfile(9000, 18000, 8), *[EQUAL] * 9]
    plan = plan_after_loss((2, 3), Sizes(10, 16), layers, unlike=False)
    assert plan.microbatches == (8, 8)
    assert [pipeline.cut for pipeline in plan.pipelines] == [(1, 9), (1, 4, 5)]
    assert plan_after_loss((3,), Sizes(10, 16), unlike=False).microbatches == (16,)


def test_the_script_has_a_number_of_its_own() -> None:
    assert plan_after_loss((2, 3), Sizes(10, 0), unlike=True).microbatches == ()


@pytest.mark.parametrize("sizes", [Sizes(10, 16), Sizes(10, 0), Sizes(3, 6)])
def test_it_is_the_plan_that_was_asked_for(sizes: Sizes) -> None:
    text = plan_after_loss((2, 3), sizes, unlike=True).to_text()
    assert plan_from_json(text).layers == sizes.layers
    assert is_plan_for(text, (2, 3), sizes)
    assert not is_plan_for(text, (3, 2), sizes)
    assert not is_plan_for(text, (2, 3), Sizes(sizes.layers + 1, sizes.microbatches))
    assert not is_plan_for(text, (2, 3), Sizes(sizes.layers, sizes.microbatches + 1))
    assert not is_plan_for("dp=2", (2, 3), sizes)


def test_costs_are_there_once_all_are() -> None:
    def of(rank: int, *names: int) -> bytes:
        return json.dumps(
            {str(rank): [asdict(LayerProfile(1000, 2000, 8, name=str(n))) for n in names]}
        ).encode()

    placed = {0: (0, 1), 1: (2,)}
    assert measured_layers([of(0, 0, 1)], placed) is None
    assert measured_layers([], {}) is None
    found = measured_layers([of(0, 0, 1), of(1, 2)], placed)
    assert found is not None
    assert [layer.name for layer in found] == ["0", "1", "2"]
