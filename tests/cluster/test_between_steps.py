"""What a script does between two steps is done again after a loss, or skipped, and no replay does it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_identical,
    once,
    one_line,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "between_steps.py"

Reference = Callable[[str], ClusterRun]


def run_between(folder: Path, *args: str, kind: str, inject: str = "", machines: int = 0) -> ClusterRun:
    args = (*args, *(["--ddp"] if kind == "ddp" else []))
    machines = machines or (2 if kind == "ddp" else 4)
    return run_cluster(folder, *args, machines=machines, inject=inject, script=training(folder, SCRIPT))


def seen_by(run: ClusterRun, rank: int) -> dict[str, list[Any]]:
    """What a worker noted in its last life: by function, the iteration and the result."""
    found: dict[str, list[Any]] = json.loads((run.folder / f"seen{rank}.json").read_text())
    return found


def saved_by(run: ClusterRun, iteration: int) -> dict[str, torch.Tensor]:
    """The script's own checkpoint."""
    folder = run.folder / f"own-{iteration}"
    wanted = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(kind.size) for name, kind in wanted.items()}  # type: ignore[union-attr]
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return once(tmp_path_factory, lambda folder, kind: run_between(folder, kind=kind))


@pytest.mark.parametrize("kind", ["ddp", "pipeline"])
@pytest.mark.parametrize(
    "die", ["validate:4:0", "validate:6:1", "save_best:4:1", "save:4:0", "save:8:1", "log:5:1"]
)
def test_a_loss_between_two_steps(kind: str, die: str, tmp_path: Path, undisturbed: Reference) -> None:
    expected = undisturbed(kind)
    run = run_between(tmp_path, "--die", die, kind=kind)
    assert_identical(run, expected)
    (recovery,) = run.recoveries
    assert recovery["mode"] == ("replica" if kind == "ddp" else "replay"), run.output[-3000:]
    assert recovery["slots"] == [int(die[-1])], f"{recovery['reasons']}\n{run.output[-6000:]}"
    for iteration in (4, 8):
        saved, original = saved_by(run, iteration), saved_by(expected, iteration)
        assert original
        assert saved.keys() == original.keys()
        assert all(torch.equal(saved[name], original[name]) for name in original)
    assert (run.folder / "best.json").read_text() == (expected.folder / "best.json").read_text()
    function, at, victim = die.split(":")
    seen, known = (seen_by(r, 1 - int(victim)) for r in (run, expected))
    assert {i: loss for i, loss in seen["loss"]} == {i: loss for i, loss in known["loss"]}  # noqa: C416
    lines = {iteration for iteration, _ in seen["log"]}
    assert lines >= {*range(1, 9)} - {int(at)}
    if function == "log":
        assert int(at) not in lines


def test_a_checkpoint_has_nothing_from_before_they_are_done_again(tmp_path: Path) -> None:
    """Worker 1 is lost while it saves the last checkpoint, which all others have saved."""
    inject = "kill worker=1 iteration=8 point=checkpoint"
    run = run_between(tmp_path, "--checkpoint-every", "4", kind="pipeline", machines=3, inject=inject)
    assert run.code == 0, run.output[-3000:]
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
    marker = run.store / "checkpoints" / "00000008" / "committed.json"
    named = {path[-1] for path in json.loads(marker.read_text())["parts"].values()}
    assert named == {"2"}, "the generation in which each part was saved"


@pytest.mark.parametrize("kind", ["ddp", "pipeline"])
def test_early_stopping(kind: str, tmp_path: Path) -> None:
    """All workers end after the same iteration, also the one that was lost there."""
    expected = run_between(tmp_path / "undisturbed", "--stop-after", "3", kind=kind)
    assert [iteration for iteration, _ in seen_by(expected, 0)["loss"]] == [2, 4, 6]
    run = run_between(tmp_path / "killed", "--stop-after", "3", "--die", "validate:6:1", kind=kind)
    assert_identical(run, expected)


def test_a_run_that_was_stopped_goes_on_when_it_is_resumed(tmp_path: Path, undisturbed: Reference) -> None:
    """As one that a scheduler has ended in time. A loss in it changes nothing."""
    stopped = run_between(tmp_path, "--stop-after", "3", kind="ddp")
    assert [iteration for iteration, _ in seen_by(stopped, 0)["loss"]] == [2, 4, 6]
    assert "was stopped after" not in stopped.output
    script = training(tmp_path, SCRIPT)
    inject = "kill machine=1 iteration=7 point=optimizer"
    run = run_cluster(tmp_path, "--ddp", machines=2, flags=["--resume"], inject=inject, script=script)
    assert "The run before was stopped after 6 iterations." in run.output
    assert_identical(run, undisturbed("ddp"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("outside", r"between_steps\.py:\d+ \(main\) calls allreduce between two steps.*session\.between\("),
        ("state", r"validate\(\) is done between two steps and changed (plateau|best)"),
        ("result", r"validate\(\) returned .* on worker \d and .* on another one"),
    ],
)
def test_what_could_not_be_recovered_is_refused(wrong: str, words: str, tmp_path: Path) -> None:
    run = run_between(tmp_path, "--wrong", wrong, kind="ddp")
    assert run.code == 2
    assert re.search(words, one_line(run)), one_line(run)


def test_the_example(tmp_path: Path) -> None:
    script = training(tmp_path, EXAMPLES / "train_habits.py")
    own = ["--own", str(tmp_path / "own"), "--validate-every", "2"]
    run = run_cluster(
        tmp_path, *own, machines=2, inject="kill machine=1 iteration=5 point=optimizer", script=script
    )
    assert run.code == 0, run.output[-3000:]
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"]
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"best.pt", "4", "8"}
    assert "iteration 4: loss" in run.output
