"""LayerStacks that begin with a plan, or by the costs of their layers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from swift_ft.config.worker_context import WorkerContext
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.errors import UsageError
from swift_ft.torch_adapters import first_cut
from swift_ft.torch_adapters.layer_stack import LayerStack

LAYERS = 8


pytestmark = pytest.mark.usefixtures("one_process")


def stack(**options: Any) -> LayerStack:
    return LayerStack(lambda _: nn.Linear(2, 2), LAYERS, **options)


def plan_file(folder: Path, *pipelines: list[list[int]], **facts: object) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps({"pipelines": [{"stages": stages} for stages in pipelines], **facts}))
    return path


def test_costs_decide_where_stages_end() -> None:
    """Two stages on this worker: an embedding and a head that cost as much as all other layers."""
    costs = [3.0, 1, 1, 1, 1, 1, 1, 3]
    assert stack(stages_per_worker=2, costs=costs).begun == (4, 4)
    assert stack(stages_per_worker=2, costs=[7, *costs[1:]]).begun == (2, 6)
    assert stack(stages_per_worker=2).begun == (4, 4)


def test_costs_of_a_file(tmp_path: Path) -> None:
    layer = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 0}
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"layers": [{**layer, "forward_s": 0.5}, *[layer] * 7]}))
    assert stack(stages_per_worker=2, costs=path).begun == (1, 7)


def measured(*sizes: int) -> list[LayerProfile]:
    """Layers that take as long, and are of these sizes."""
    return [LayerProfile(1000, 2000, size) for size in sizes]


def test_a_stage_gets_no_more_than_it_has_memory_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An embedding is as fast as any layer, and has most of the state. Stages share 805 of 1,150 bytes."""
    costs = measured(350, 50, 50, 50, 50, 50, 50, 50)
    monkeypatch.setattr(first_cut, "most_bytes", lambda: 2300)
    assert stack(stages_per_worker=2, costs=costs).begun == (4, 4)
    monkeypatch.setattr(first_cut, "most_bytes", lambda: 1150)
    assert stack(stages_per_worker=2, costs=costs).begun == (2, 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING):
        assert stack(stages_per_worker=2, costs=costs).begun == (4, 4)
    (record,) = caplog.records
    assert record.__dict__["event"] == "layers_too_large"
    assert "their state takes 700 B, stages have room for 201 B, 201 B" in record.getMessage()


def test_activations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage keeps those of two microbatches."""
    costs = [LayerProfile(1000, 2000, 10, activation_bytes=40)] * 8
    monkeypatch.setattr(first_cut, "most_bytes", lambda: 940)
    assert stack(stages_per_worker=2, costs=costs).begun == (3, 5)


def test_memory_that_nobody_knows_limits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_cut, "most_bytes", lambda: None)
    assert stack(stages_per_worker=2, costs=measured(*[1 << 50] * 8)).begun == (4, 4)


def test_a_planned_cut(tmp_path: Path) -> None:
    made = stack(stages_per_worker=2, plan=plan_file(tmp_path, [[0, 2], [3, 7]], stages_per_worker=2))
    assert (made.begun, made.counts, made.microbatches) == ((3, 5), (), 0)
    assert [len([*part.children()]) for part in made.parts] == [3, 5]


def test_it_is_noted_whether_the_script_asks_for_its_microbatches() -> None:
    made = stack()
    assert not made.takes_microbatches
    assert made.microbatches == 0
    assert made.takes_microbatches


def test_it_is_noted_whether_the_script_asks_for_the_counts_of_all() -> None:
    """Not in an attribute, which would be one of the script's variables if it is asked for in a step."""
    made, other = stack(), stack()
    attributes = {**vars(made)}
    assert made.microbatches == 0
    assert made.planned_counts == ()
    assert not made.takes_counts
    assert made.counts == ()
    assert made.takes_counts
    assert not other.takes_counts
    assert vars(made) == {**attributes, "takes_microbatches": True}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"costs": [1.0] * 7}, "costs= has 7 layers, and the LayerStack 8"),
        ({"costs": [0] * 8}, "no layer that costs anything"),
        ({"costs": [1.0, float("nan"), *[1.0] * 6]}, "costs= has nan for layer 1"),
        ({"costs": [1.0, -1, *[1.0] * 6]}, "costs= has -1 for layer 1"),
        ({"costs": "none.json"}, "none.json cannot be read"),
        ({"plan": "none.json"}, "none.json cannot be read"),
        ({"min_stages": 2}, "A pipeline would have 1 stages, and the LayerStack needs min_stages=2"),
    ],
)
def test_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        stack(**options)


@pytest.mark.parametrize(
    ("pipelines", "options", "why"),
    [
        ([[[0, 6]]], {}, "for a model of 7 layers, and the LayerStack has 8"),
        ([[[0, 3], [4, 7]]], {}, "The plan is for 2 workers, and the job has 1"),
        ([[[0, 7]]], {"pipelines": 2}, "The plan has 1 pipelines, and the LayerStack pipelines=2"),
        ([[[0, 7]]], {"tolerate": 1}, "1 pipelines have 1 copies of each layer"),
        ([[[0, 7]]], {"costs": [1.0] * 8}, "plan= and costs= say which layers a stage has"),
        ([[[0, 7]]], {"stages_per_worker": 2}, "1 stages per worker, and the LayerStack 2"),
    ],
)
def test_a_plan_of_something_else(
    pipelines: list[list[list[int]]], options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=why):
        stack(plan=plan_file(tmp_path, *pipelines), **options)


def test_the_plan_of_a_change_comes_before_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that of the script, too, which one of the run does not come before."""
    of_run, of_world = (
        json.dumps({"pipelines": [{"stages": [[0, first], [first + 1, 7]]}], "stages_per_worker": 2})
        for first in (2, 5)
    )
    context = SimpleNamespace(plan="", layer_plan=of_run, workers_per_machine=1)
    monkeypatch.setattr(WorkerContext, "from_env", lambda: context)
    assert stack(stages_per_worker=2).begun == (3, 5)
    with pytest.raises(UsageError, match="swift-run --plan and costs= say"):
        stack(stages_per_worker=2, costs=[1.0] * 8)
    context.plan = context.layer_plan = of_world
    assert stack(stages_per_worker=2, costs=[1.0] * 8).begun == (6, 2)
    context.plan, context.layer_plan = "pp=2", None  # degrees say nothing of layers
    assert stack(stages_per_worker=2, costs=[1.0] * 8).begun == (4, 4)
