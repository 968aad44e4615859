"""A machine is slower than its peers for a while: it is named, gets fewer layers, or is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_layouts import layers_of
from tests.support.cluster import ClusterRun, assert_same_layers, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "slow_machine.py"
ITERATIONS, FROM, UNTIL = 100, 15, 55
EVEN = [2, 3, 2, 3]


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OF", "train_elastic"), ("SLOW", 1), ("FROM", FROM), ("UNTIL", UNTIL)):
        monkeypatch.setenv(name, str(value))


def run(folder: Path, *flags: str, iterations: int = ITERATIONS, machines: int = 4) -> ClusterRun:
    script = training(folder, SCRIPT, iterations=iterations)
    return run_cluster(folder, machines=machines, flags=["--spares", "0", *flags], script=script)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("OF", "train_elastic"), ("SLOW", -1), ("FROM", 0), ("UNTIL", 0)):
            patch.setenv(name, str(value))
        return run(tmp_path_factory.mktemp("undisturbed"))


def paces(found: ClusterRun) -> list[tuple[int, int, int]]:
    """What was noted: iteration, rank, and whether the worker is slow."""
    noted = [event for event in found.report["events"] if event["event"] == "PaceNoted"]
    return [(event["iteration"], event["rank"], event["permille"]) for event in noted]


def test_it_is_named(tmp_path: Path, undisturbed: ClusterRun) -> None:
    found = run(tmp_path)
    assert_same_layers(found, undisturbed)
    of_slow = [one for one in paces(found) if one[1] == 1]  # whatever else runs may slow another one, too
    (first, _, pace), *_ = of_slow
    assert FROM < first <= FROM + 20
    assert pace > 1500
    (over, *_) = (iteration for iteration, _, pace in of_slow if pace <= 1000)
    assert over > UNTIL
    assert "times as long as its peers would for its own work" in found.output
    assert "worker 1 is as fast as its peers again" in found.output
    assert found.report["layouts"] == []


def test_it_gets_fewer_layers_as_long_as_it_is_slow(tmp_path: Path, undisturbed: ClusterRun) -> None:
    found = run(tmp_path, "--stragglers", "rebalance")
    assert_same_layers(found, undisturbed)
    layouts = [change["layers"] for change in found.report["layouts"]]
    assert layouts[0][1] < EVEN[1], layouts
    assert layouts[-1] == EVEN
    assert [len(layers) for layers in layers_of(found)] == EVEN


@pytest.mark.thorough
def test_a_spare_takes_its_place(tmp_path: Path, undisturbed: ClusterRun) -> None:
    found = run(tmp_path, "--stragglers", "replace", "--spares", "1")
    assert_same_layers(found, undisturbed)
    assert "machine 1 is asked to leave by --stragglers replace" in found.output
    assert "machine 1 leaves" in found.output
    assert [rank for _, rank, _ in paces(found)][:1] == [1]


@pytest.mark.thorough
def test_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other's gradients, and does not count that."""
    monkeypatch.setenv("OF", "train_ddp")
    found = run(tmp_path, "--stragglers", "rebalance", machines=2)
    assert found.code == 0, found.output[-3000:]
    noted = paces(found)
    assert noted[0][1] == 1, noted  # whatever else the machine is busy with may slow the other one later
    assert FROM < noted[0][0] <= FROM + 30  # what workers say is published once a second
    assert "--stragglers rebalance has no effect: what can move are the layers" in found.output
