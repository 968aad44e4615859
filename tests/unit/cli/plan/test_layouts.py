"""``swift-plan templates``, ``instantiate`` and ``compare``: answers, pictures, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.plan.main import main


@pytest.fixture
def layers(tmp_path: Path) -> str:
    """Eight layers, the last of them slower."""
    one = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 1e9}
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"layers": [*[one] * 7, {**one, "forward_s": 0.02, "backward_s": 0.04}]}))
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """What a command prints as JSON."""
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_templates(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("templates", "--layers", layers, "--nodes", "7", "--devices-per-node", "1")
    found = answer(capsys, *argv, "--tolerate", "1", "--min-nodes", "3")
    assert found.keys() == {"templates", "sets"}
    assert found["sets"] == 1  # 3 + 4
    three, four = found["templates"]
    assert three.keys() == {"nodes", "stages", "devices", "iteration_s", "proven"}
    assert three == {
        "nodes": 3,
        "stages": [[0, 2], [3, 5], [6, 7]],
        "devices": [1, 1, 1],
        "iteration_s": pytest.approx((12 + 2) * 0.09),
        "proven": True,
    }
    assert four["nodes"] == 4
    assert four["stages"][-1][-1] == 7


def test_templates_with_several_devices_per_node(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("templates", "--layers", layers, "--nodes", "2", "--devices-per-node", "4", "--tolerate", "0")
    one, two = answer(capsys, *argv)["templates"]
    assert (one["devices"], two["devices"]) == ([4], [4, 4])
    assert answer(capsys, *argv, "--tensor-overhead", "1", "--microbatches", "99")["templates"][0][
        "devices"
    ] == [1, 1, 1, 1]


def test_instantiate(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("instantiate", "--layers", layers, "--nodes", "7", "--tolerate", "1", "--min-nodes", "2")
    found = answer(capsys, *argv, "--global-batch", "48")
    pipelines = found["pipelines"]
    assert sum(one["nodes"] for one in pipelines) == 7
    assert sum(one["microbatches"] for one in pipelines) == 48
    assert len(pipelines) >= 2


@pytest.mark.parametrize("schedule", ["zero-bubble", "interleaved-1f1b", "zbv", "looped-bfs", "dualpipev"])
def test_instantiate_under_other_schedules(
    schedule: str, layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("instantiate", "--layers", layers, "--nodes", "4", "--min-nodes", "2", "--schedule", schedule)
    found = answer(capsys, *argv, "--global-batch", "16")
    assert sum(one["microbatches"] for one in found["pipelines"]) == 16
    per_worker = 1 if schedule == "zero-bubble" else 2
    assert [len(one["stages"]) for one in found["pipelines"]] == [2 * per_worker] * 2


def test_compare(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "compare", "--layers", layers, "--nodes", "4", "--microbatches", "16")
    rows = {row["schedule"]: row for row in found["schedules"]}
    assert list(rows) == [
        "gpipe",
        "1f1b",
        "looped-bfs",
        "interleaved-1f1b",
        "zero-bubble",
        "zbv",
        "dualpipev",
    ]
    assert rows["zbv"]["bubble"] < rows["1f1b"]["bubble"]
    assert [rows[name]["stages_per_worker"] for name in ("1f1b", "zero-bubble", "zbv")] == [1, 1, 2]
    assert rows["zero-bubble"]["iteration_s"] < rows["1f1b"]["iteration_s"]
    assert 0 < rows["1f1b"]["bubble"] < 1


@pytest.mark.parametrize(
    "argv",
    [
        ("templates", "--nodes", "4", "--min-nodes", "2", "--tolerate", "1"),
        ("instantiate", "--nodes", "4", "--min-nodes", "2", "--tolerate", "1", "--global-batch", "16"),
        ("compare", "--nodes", "4"),
    ],
    ids=lambda argv: argv[0],
)
def test_tables_and_pictures(
    argv: tuple[str, ...], layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "stages.svg"
    assert main([*argv, "--layers", layers, "--plot", str(picture)]) == 0
    assert "<svg" in picture.read_text()
    shown = capsys.readouterr().out
    assert "iteration" in shown


def test_a_table_of_schedules(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--layers", layers, "--nodes", "4"]) == 0
    assert "16 microbatches; the times are exact" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("templates", "--nodes", "3", "--min-nodes", "2"), "1 more nodes would do, or --tolerate 0"),
        (("templates", "--nodes", "4", "--memory", "1GB", "--tolerate", "0"), "--memory 2000000000 would do"),
        (("templates", "--nodes", "3", "--min-nodes", "5"), "7 more nodes would do\n"),
        (("templates", "--nodes", "0"), "0 nodes cannot hold a pipeline: --nodes must be at least 1"),
        (("templates", "--nodes", "-4"), "-4 nodes cannot hold a pipeline"),
        (("compare", "--nodes", "0"), "--nodes must be at least 1"),
        (("templates", "--nodes", "99999999999"), "99999999999 is too large to plan for: 4096 at most"),
        (("templates", "--nodes", "x"), "'x' is no whole number"),
        (("templates", "--nodes", "4", "--microbatches", "1000000"), "is too large to plan for"),
        (("instantiate", "--nodes", "4", "--global-batch", "1000000000"), "is too large to plan for"),
        (
            ("templates", "--nodes", "4", "--devices-per-node", "1023"),
            "1 node of 512 devices would do",
        ),
        (("templates", "--nodes", "4", "--microbatches", "0"), "--microbatches is 0"),
        (("templates", "--nodes", "4", "--devices-per-node", "0"), "a node has 0 devices"),
        (("templates", "--nodes", "4", "--tensor-overhead", "2"), "must be between 0 and 1"),
        (
            ("compare", "--nodes", "9"),
            "9 nodes of 1 devices: they need at least 9 stages, 1 more than layers",
        ),
        (
            ("instantiate", "--nodes", "4", "--global-batch", "3"),
            "global batch of 3 microbatches is 1 too small",
        ),
        (
            ("instantiate", "--nodes", "4", "--global-batch", "1", "--schedule", "zero-bubble"),
            "a global batch of 1 microbatches is too small",
        ),
        (
            ("templates", "--nodes", "2", "--schedule", "zbv", "--stages-per-worker", "3"),
            "zbv takes 2 stages per worker, not 3",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    argv: tuple[str, ...], message: str, layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--layers", layers]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.count("\n") == 1


def test_a_broken_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "layers.json").write_text('{"layers": [{"forward_s": 1}]}')
    assert main(["templates", "--layers", str(tmp_path / "layers.json"), "--nodes", "2"]) == 2
    err = capsys.readouterr().err
    assert err.endswith("layers.json: layer 0 has no 'backward_s'\n")
