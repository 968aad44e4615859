"""``swift-plan reshard`` and ``swift-plan devices``: answers for programs, tables, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_ft.cli.plan.main import main
from tests.support.pictures import texts_of


@pytest.fixture
def layers(tmp_path: Path) -> str:
    """A file of 32 layers with 16 bytes for each of 6.7 billion parameters."""
    path = tmp_path / "layers.json"
    layer = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 3_350_000_000}
    path.write_text(json.dumps({"layers": [layer] * 32}))
    return str(path)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """A file with one A100 and four H20."""
    path = tmp_path / "cluster.json"
    nodes = [
        {"type": "A100", "devices": 1, "tflops": 312, "memory_bytes": 80e9},
        {"type": "H20", "devices": 4, "tflops": 148, "memory_bytes": 96e9},
    ]
    path.write_text(json.dumps({"nodes": nodes}))
    return str(path)


def test_what_moves(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["reshard", "--from", "tp=4,pp=2,dp=1", "--to", "tp=4,pp=4,dp=1", "--layers", layers, "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {
        "moved_bytes": 53_600_000_000,
        "state_bytes": 107_200_000_000,
        "rank_order_bytes": 80_400_000_000,
    }


def test_what_a_loss_moves_as_a_table(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = ["--from", "tp=2,pp=2,dp=2"], ["--to", "tp=2,pp=2,dp=2"]
    assert main(["reshard", *old, *new, "--layers", layers, "--lost", "0,4", "--devices-per-node", "2"]) == 0
    out = capsys.readouterr().out
    assert "from the checkpoint" in out
    lines = {
        line.split("│")[1].strip(): line.split("│")[3].strip() for line in out.splitlines() if "│" in line
    }
    assert lines["from the checkpoint"] == "0.500"  # devices 0 and 4 were the replicas of one quarter
    assert lines["stays where it is"] == "1.500"
    assert "1 2 3 5 6 7" in " ".join(sorted(out.rpartition(":")[2].split(), key=int))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.toml", "[parallelism]\ntensor_parallel_degree = 2\npipeline_parallel_degree = 2\n"),
        ("zero3.json", '{"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 4}}'),
    ],
)
def test_state_that_is_shared_has_one_copy(
    layers: str, name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of 16 workers has a sixteenth. All must have all: fifteen sixteenths move to each."""
    path = tmp_path / name
    path.write_text(text)
    given = ["reshard", "--from", str(path), "--from-workers", "16", "--to", "dp=16", "--layers", layers]
    assert main([*given, "--json"]) == 0
    state = 32 * 3_350_000_000
    assert json.loads(capsys.readouterr().out)["moved_bytes"] == 15 * state


def test_devices_have_the_ranks_that_megatron_gives_them(
    layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 0 and 1 hold the first stage, 2 and 3 the second: both replicas of one are on one node."""
    path = tmp_path / "megatron.args"
    path.write_text("--pipeline-model-parallel-size 2 --num-layers 30 --use-tp-pp-dp-mapping\n")
    given = ["reshard", "--from", "{}", "--from-workers", "4", "--to", "pp=2", "--layers", layers]
    given += ["--lost", "0,1", "--devices-per-node", "2", "--json"]
    moved = {}
    for text in (path.read_text(), path.read_text().replace("--use-tp-pp-dp-mapping", "")):
        path.write_text(text)
        given[2] = str(path)
        assert main(given) == 0
        moved["mapping" in text] = json.loads(capsys.readouterr().out)["moved_bytes"]
    assert moved == {True: 0, False: 16 * 3_350_000_000}  # here what both had comes from the checkpoint


def test_the_least_time_of_a_change(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages become one on both nodes: 53.6 GB come to each, half through each of two adapters."""
    given = ["reshard", "--from", "tp=4,pp=2", "--to", "tp=4,dp=2", "--layers", layers]
    given += [
        "--devices-per-node",
        "4",
        "--inside-link",
        "100GB/s",
        "--node-link",
        "80Gbps",
        "--node-links=2",
    ]
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["least_s"] == pytest.approx(53.6 / 2 / 10)
    assert main(given) == 0
    assert "Takes at least 0.000 s inside nodes and 2.68 s between them, at once." in capsys.readouterr().out


def test_an_own_cut_of_megatron(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The profile has an embedding and a head beside 30 blocks: 11 layers on one stage, 21 on the other."""
    arguments = "--pipeline-model-parallel-size 2 --num-layers 30 --decoder-first-pipeline-num-layers 10"
    given = ["reshard", f"--from={arguments}", "--from-workers", "2", "--to", "pp=2", "--layers", layers]
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["moved_bytes"] == 5 * 3_350_000_000


def test_even_stages_are_those_of_who_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten layers on three stages: a LayerStack begins as (3, 3, 4), and torchtitan as (4, 3, 3)."""
    path, titan = tmp_path / "layers.json", tmp_path / "train.toml"
    layer = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 100}
    path.write_text(json.dumps({"layers": [layer] * 10}))
    titan.write_text("[parallelism]\npipeline_parallel_degree = 3\n")
    stack = "--pipeline-model-parallel-size 3 --num-layers 10 --decoder-first-pipeline-num-layers 3"
    stack += " --decoder-last-pipeline-num-layers 4"
    moved = {}
    for name, old in (("pp=3", "pp=3"), ("torchtitan", str(titan)), ("cut", stack)):
        given = ["reshard", f"--from={old}", "--from-workers", "3", f"--to={stack}", "--to-workers", "3"]
        assert main([*given, "--layers", str(path), "--json"]) == 0
        moved[name] = json.loads(capsys.readouterr().out)["moved_bytes"]
    assert moved == {"pp=3": 0, "torchtitan": 2 * 100, "cut": 0}


def test_groups_of_unlike_devices(layers: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["devices", "--cluster", cluster, "--layers", layers, "--microbatches", "16"]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"tp", "pipelines", "workers_per_machine", "iteration_s"}
    assert [pipeline["machines"] for pipeline in answer["pipelines"]] == [[0, 1], [2, 3, 4]]
    assert [pipeline["nodes"] for pipeline in answer["pipelines"]] == [[1, 0], [1, 1, 1]]
    assert [pipeline["devices"] for pipeline in answer["pipelines"]] == [{"A100": 1, "H20": 1}, {"H20": 3}]
    assert answer["pipelines"][0]["stages"] == [[0, 9], [10, 31]]
    assert main(command) == 0
    assert "2 pipelines of 16 microbatches each: 12.5 s" in capsys.readouterr().out


def test_pictures(layers: str, cluster: str, tmp_path: Path) -> None:
    moved, grouped = tmp_path / "moved.svg", tmp_path / "grouped.svg"
    layouts = ["--from", "tp=2,pp=2", "--to", "tp=2,pp=4", "--lost", "0", "--devices-per-node", "2"]
    assert main(["reshard", *layouts, "--layers", layers, "--plot", str(moved), "--json"]) == 0
    assert "from the checkpoint" in texts_of(moved)
    command = ["devices", "--cluster", cluster, "--layers", layers, "--microbatches", "16", "--json"]
    assert main([*command, "--plot", str(grouped)]) == 0
    assert {"10-31", "A100", "pipeline 1"} <= texts_of(grouped)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--to", "tp=4,pp=64"], "choose pp from 1 to 32"),
        (["--to", "tp=4,xp=2"], "'xp' is no degree: the nearest name is 'tp'"),
        (["--to", "tp=0"], "tp=0 is no degree"),
        (["--to", "tp=1024,dp=1024"], "too large"),
        (["--lost", "9"], "the old layout has 0 to 7"),
        (["--devices-per-node", "0"], "at least one device"),
        (["--layers", "/nowhere.json"], "cannot be read"),
        (["--to", "/nowhere.toml"], "swift-plan: /nowhere.toml cannot be read"),
        (
            ["--inside-link", "1GB/s", "--devices-per-node", "2"],
            "a time needs --inside-link, --node-link and",
        ),
        (["--to", "tp=4", "--to-workers", "6"], "tp=4 do not fit 6 workers"),
        (["--to", "x" * 5000 + "=1"], "is no degree"),
        (['--to={"tensor_parallel_degree": 2}'], "say how many there are"),
        (
            ["--from", "dp_shard=2", '--to={"zero_optimization": {"stage": 1}}', "--to-workers", "2"],
            "share state in stages 1 and 3 of ZeRO",
        ),
        (
            [
                "--to=--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
                "--to-workers=2",
            ],
            "2 stages per worker are not contiguous layers",
        ),
    ],
)
def test_mistakes_end_in_one_line(
    layers: str, change: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["reshard", "--from", "tp=4,pp=2,dp=1", "--to", "tp=4,pp=4,dp=1", "--layers", layers]
    assert main([*given, *change]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.startswith("swift-plan")
    assert err.count("\n") == 1
    assert not out


def test_a_cluster_that_is_too_small(
    layers: str, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.json"
    small.write_text('{"nodes": [{"type": "A100", "devices": 1, "tflops": 312, "memory_bytes": 80e9}]}')
    assert main(["devices", "--cluster", str(small), "--layers", layers, "--microbatches", "16"]) == 2
    assert "27.2 GB more are needed" in capsys.readouterr().err


def test_too_many_microbatches_are_refused(
    layers: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices", "--cluster", cluster, "--layers", layers, "--microbatches", "9" * 14]) == 2
    assert "is too large to plan for: 65536 at most" in capsys.readouterr().err
