"""``swift-plan reconfigure``: its answers, and one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_ft.cli.plan.main import main
from tests.support.pictures import texts_of

FOUR = "[[0,1],[2,3,4],[5,6,7,8],[9,10,11,12,13]]"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["reconfigure", "--pipelines", "[[0,1],[2,3,4]]", "--lost", "2", "--min-nodes", "2", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out) == {"pipelines": [[0, 1], [3, 4]]}


def test_a_table_says_where_nodes_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reconfigure", "--pipelines", FOUR, "--lost", "1,3-4", "--min-nodes", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "0 0 13 0 3" in shown
    assert "4 pipelines: they survive the loss of any 3 of their nodes" in shown
    assert "2 nodes come to another pipeline" in shown


def test_a_picture_says_where_nodes_come_from(tmp_path: Path) -> None:
    picture = tmp_path / "nodes.svg"
    argv = ["reconfigure", "--pipelines", "[[0,1],[2,3,4]]", "--lost", "1,3", "--min-nodes", "3"]
    assert main([*argv, "--plot", str(picture)]) == 0
    assert {"from 0", "from 1", "3 nodes"} <= texts_of(picture)


@pytest.mark.parametrize(
    ("pipelines", "lost", "message"),
    [
        ("[[0,1", "0", "is no list of lists"),
        ("[0,1]", "0", "is no list of lists"),
        ('[["a"]]', "0", '"a" is no node'),
        ("[[0,-1]]", "0", "-1 is no node"),
        ("[[0,1]]", "x", "'x' is no node"),
        ("[[0,1]]", "0-9999999", "more than a million"),
        ("[[0,1]]", "4-2", "'4-2' names no node: write it as 2-4"),
        ("[[0,1]]", "3", "node 3 is lost and in no pipeline"),
        ("[[0,1]]", "1", "1 nodes are left and the smallest pipeline needs 2: 1 more would do"),
    ],
)
def test_a_mistake_is_one_line(
    pipelines: str, lost: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reconfigure", "--pipelines", pipelines, "--lost", lost, "--min-nodes", "2"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.startswith("swift-plan: ")
    assert err.count("\n") == 1


@pytest.fixture
def layers(tmp_path: Path) -> str:
    """Eight layers that are alike."""
    one = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 1e9}
    (tmp_path / "layers.json").write_text(json.dumps({"layers": [one] * 8}))
    return str(tmp_path / "layers.json")


GROWING = ("--pipelines", "[[0,1],[2,3,4]]", "--lost", "4", "--min-nodes", "2", "--tolerate", "1")


def test_added_nodes_form_the_best_pipelines(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["reconfigure", *GROWING, "--added", "5-8", "--layers", layers, "--global-batch", "32"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(node for one in found["pipelines"] for node in one) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert found["iteration_s"] < found["before_s"]
    gain_s = found["before_s"] - found["iteration_s"]
    assert found["pays_after_iterations"] == pytest.approx(30 / gain_s, abs=1)
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "new" in shown
    assert f"has paid after {found['pays_after_iterations']} iterations" in shown


def test_a_node_that_brings_nothing_does_not_pay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first layer takes nearly all time, and cannot be divided."""
    one = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 1e9}
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps({"layers": [{**one, "forward_s": 1, "backward_s": 2}, *[one] * 7]}))
    argv = ["reconfigure", "--pipelines", "[[0,1,2,3]]", "--min-nodes", "4", "--added", "4"]
    assert main([*argv, "--layers", str(layers), "--global-batch", "16"]) == 0
    assert "the change does not pay" in capsys.readouterr().out


def test_added_nodes_need_the_costs_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reconfigure", *GROWING, "--added", "5"]) == 2
    assert "--added needs --layers and --global-batch" in capsys.readouterr().err
