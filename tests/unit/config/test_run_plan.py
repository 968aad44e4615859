"""The file with which a run begins: what it says, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli import run
from swift_ft.cli.plan.main import main as swift_plan
from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.config.run_config import RunConfig
from swift_ft.config.run_plan import RunPlan, plan_from_json, read_plan
from swift_ft.errors import UsageError
from swift_ft.launch.rendezvous.setup import setup_of
from swift_ft.recovery.events import JobOpened

TWO: dict[str, Any] = {"stages": [[0, 3], [4, 9]], "microbatches": 5, "machines": [0, 1]}
THREE: dict[str, Any] = {"stages": [[0, 1], [2, 6], [7, 9]], "microbatches": 11, "machines": [2, 3, 4]}


def plan_of(*pipelines: object, **facts: object) -> RunPlan:
    return plan_from_json(json.dumps({"pipelines": pipelines, **facts}))


def test_two_and_three_stages() -> None:
    plan = plan_of(TWO, THREE, iteration_s=1.5)
    assert [pipeline.cut for pipeline in plan.pipelines] == [(4, 6), (2, 5, 3)]
    assert (plan.layers, plan.workers, plan.microbatches) == (10, 5, (5, 11))
    assert plan.ranks == ((0, 1), (2, 3, 4))
    assert plan_from_json(plan.to_text()) == plan
    plan.check_workers(5, 1)
    plan.check_model(10, 1)


def test_pipelines_across_machines() -> None:
    """Replicas of a stage are on one machine; each pipeline is on both."""
    pipelines = [{"stages": [[0, 1], [2, 4]], "machines": [0, 1]}] * 2
    plan = plan_of(*pipelines, workers_per_machine=2)
    assert plan.ranks == ((0, 2), (1, 3))
    assert plan.microbatches == ()
    with pytest.raises(UsageError, match="for machines of 2 workers, and those of the job have 4"):
        plan.check_workers(1, 4)


def test_several_stages_of_a_worker() -> None:
    plan = plan_of({"stages": [[0, 1], [2, 4], [5, 5], [6, 9]]}, stages_per_worker=2)
    assert (plan.workers, plan.ranks) == (2, ((0, 1),))
    with pytest.raises(UsageError, match="2 stages per worker, and the LayerStack 1"):
        plan.check_model(10, 1)


REFUSED: list[tuple[object, str]] = [
    ([], "expected a JSON object"),
    ({"pipelines": []}, "needs a list 'pipelines'"),
    ({"pipelines": [TWO], "layer": 3}, "unknown key 'layer'"),
    ({"pipelines": [TWO], "tp": 2}, "stages are on 2 devices each"),
    ({"pipelines": [TWO], "workers_per_machine": 0}, "'workers_per_machine' is 0"),
    ({"pipelines": [{**TWO, "devices": [1, 2]}]}, "a stage is on 2 devices"),
    ({"pipelines": [{**TWO, "shares": 2}]}, "unknown key 'shares'"),
    ({"pipelines": [{}]}, "needs a list 'stages'"),
    ({"pipelines": [{"stages": [3, 4]}]}, r"stage 0 is 3: it must be \[first layer, last layer\]"),
    ({"pipelines": [{"stages": [[0, True]]}]}, "'stage 0' is True"),
    ({"pipelines": [{"stages": [[0, 3], [5, 9]]}]}, "stage 1 has layers 5 to 9: it must begin with layer 4"),
    ({"pipelines": [{"stages": [[0, 3], [4, 3]]}]}, "and have one layer or more"),
    ({"pipelines": [{**TWO, "microbatches": 1.5}]}, "'microbatches' is 1.5"),
    ({"pipelines": [{**TWO, "machines": 3}]}, "'machines' is 3"),
    ({"pipelines": [{**TWO, "machines": [0]}]}, "pipeline 0 has 2 workers and 1 machines"),
    ({"pipelines": [TWO, {"stages": [[0, 8]]}]}, "pipeline 1 has 9 layers, and pipeline 0 has 10"),
    ({"pipelines": [{"stages": [[0, 8]]}], "stages_per_worker": 2}, "no multiple of the 2 of a worker"),
    ({"pipelines": [TWO, {"stages": [[0, 9]], "machines": [2]}]}, "some pipelines have 'microbatches'"),
    ({"pipelines": [TWO, {"stages": [[0, 9]], "microbatches": 1}]}, "some pipelines have 'machines'"),
    ({"pipelines": [{**TWO, "machines": [0, 2]}]}, "machine 1 has 0 workers"),
    ({"pipelines": [{**TWO, "machines": [1, 0]}]}, "must be in ascending order"),
    ({"pipelines": [{**TWO, "machines": [1, 2]}, {**TWO, "machines": [0, 3]}]}, "order of their first"),
]


@pytest.mark.parametrize(("content", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_no_plan(content: object, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        plan_from_json(json.dumps(content), "plan.json")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not a text file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="not valid JSON"):
        plan_from_json("{")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ("--machines", "4"),
            "The plan is for 5 workers, and the job has 4 (machines: 4, workers of each: 1)",
        ),
        (("--nnodes", "2:4", "--rdzv-endpoint", "localhost:1", "--rdzv-id", "x"), "the job has 4"),
        (("--machines", "1", "--nproc-per-node", "5"), "give --nproc-per-node 1"),
    ],
)
def test_a_job_of_another_size(
    flags: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything begins."""
    (tmp_path / "plan.json").write_text(json.dumps({"pipelines": [TWO, THREE]}))
    standalone = () if "--rdzv-id" in flags else ("--standalone",)
    assert run.main([*standalone, *flags, "--plan", str(tmp_path / "plan.json"), __file__]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_launchers_compare_digests() -> None:
    one, other = (
        setup_of(JobOpened(machines=2), RunConfig(plan=plan_of(pipeline).to_text()), "script", "train.py")
        for pipeline in (TWO, {**TWO, "microbatches": 6})
    )
    (own,), (its,) = ([fact for fact in facts if fact.startswith("--plan: ")] for facts in (one, other))
    assert own != its
    assert len(own) < 100


def test_what_swift_plan_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 1e9, "activation_bytes": 1e6}
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps({"layers": [layer] * 8}))
    command = ["instantiate", "--layers", str(layers), "--nodes", "5", "--min-nodes", "2", "--json"]
    assert swift_plan([*command, "--global-batch", "16"]) == 0
    plan = plan_from_json(capsys.readouterr().out)
    assert sorted(len(pipeline.cut) for pipeline in plan.pipelines) == [2, 3]
    assert sum(plan.microbatches) == 16
    plan.check_workers(5, 1)
    plan.check_model(8, 1)
    assert swift_plan([*command, "--global-batch", "16", "--schedule", "interleaved-1f1b"]) == 0
    plan_from_json(capsys.readouterr().out).check_model(8, 2)
    assert swift_plan([*command, "--global-batch", "16", "--devices-per-node", "2"]) == 0
    printed = capsys.readouterr().out
    if any(set(pipeline["devices"]) != {1} for pipeline in json.loads(printed)["pipelines"]):
        with pytest.raises(UsageError, match="a LayerStack has a stage on one"):
            plan_from_json(printed)
    cluster = tmp_path / "cluster.json"
    node = {"type": "A100", "devices": 2, "tflops": 312, "memory_bytes": 80e9}
    cluster.write_text(json.dumps({"nodes": [node, {**node, "type": "H20", "tflops": 148}]}))
    command = ["devices", "--cluster", str(cluster), "--layers", str(layers), "--microbatches", "8"]
    assert swift_plan([*command, "--tp", "1", "--json"]) == 0
    plan = plan_from_json(capsys.readouterr().out)
    assert plan.workers == 4
    plan.check_workers(4 // plan.workers_per_machine, plan.workers_per_machine)
