"""What a script itself communicates in its steps survives a loss, bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ClusterRun, assert_identical, assert_undisturbed, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "talks.py"
WITHOUT_A_STORE = SCRIPT.with_name("talks_without_a_store.py")


def run_talking(folder: Path, *args: str, inject: str = "") -> ClusterRun:
    return run_cluster(folder, *args, inject=inject, script=training(folder, SCRIPT))


def seen_by(run: ClusterRun, rank: int) -> dict[str, Any]:
    """What a worker was given in each iteration that it computed, in any of its lives."""
    found: dict[str, Any] = json.loads((run.folder / f"seen{rank}.json").read_text())
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_talking(tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.parametrize(
    "inject",
    [
        "kill machine=0 iteration=5 point=forward microbatch=3",
        "kill machine=1 iteration=5 point=backward microbatch=3",
        "kill machine=2 iteration=4 point=optimizer",
        "kill machine=3 iteration=6 point=optimizer",
        "kill machine=1 iteration=5 point=optimizer; kill machine=1 iteration=4 point=replay",
        "kill machine=1 iteration=5 point=forward microbatch=3; "
        "kill machine=2 iteration=5 point=forward microbatch=3",
        "kill machine=3 iteration=5 point=optimizer; kill machine=0 iteration=7 point=forward microbatch=2",
    ],
)
def test_a_loss(inject: str, tmp_path: Path, reference: ClusterRun) -> None:
    run = run_talking(tmp_path, inject=inject)
    assert_identical(run, reference)
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}, run.output[-3000:]
    for rank in range(4):
        expected = seen_by(reference, rank)
        for iteration, given in seen_by(run, rank).items():
            assert given == expected[iteration], (rank, iteration)


def test_messages_that_are_taken_by_their_tags(tmp_path: Path) -> None:
    """Whoever receives them is lost. In the order in which they were sent, each would be the other one.

    One iteration is replayed, and nothing is compared after the messages of that.
    """
    undisturbed = assert_undisturbed(run_talking(tmp_path / "undisturbed", "--tags"))
    fault = "kill machine=0 iteration=4 point=forward microbatch=3"
    run = run_talking(tmp_path / "disturbed", "--tags", inject=fault)
    assert_identical(run, undisturbed)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    expected, seen = seen_by(undisturbed, 0), seen_by(run, 0)
    assert "3" in seen
    assert seen == {iteration: expected[iteration] for iteration in seen}


def test_the_only_members_of_a_group_are_lost(tmp_path: Path, reference: ClusterRun) -> None:
    """They are no neighbours, so they replay apart. The log of what they reduced was lost with both."""
    at = "iteration=5 point=forward microbatch=0"
    run = run_talking(tmp_path, inject=f"kill machine=0 {at}; kill machine=3 {at}")
    assert_identical(run, reference)
    assert run.recoveries[-1]["mode"] in ("replay", "fallback")  # the second kill may come after the first


def test_workers_that_are_ahead_serve_what_they_were_given(tmp_path: Path) -> None:
    """They have completed the iteration that others repeat, and with it what was communicated in it."""
    undisturbed = run_talking(tmp_path / "undisturbed", "--only-first")
    fault = "kill machine=1 iteration=5 point=backward microbatch=7"
    run = run_talking(tmp_path / "disturbed", "--only-first", inject=fault)
    assert_identical(run, undisturbed)
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["ahead"]) == ("replay", [2, 3])


def test_they_serve_it_until_it_is_repeated(tmp_path: Path) -> None:
    """No store has it, and those behind ask for it only in the step that they repeat, when all are live."""
    undisturbed = run_talking(tmp_path / "undisturbed", "--only-first")
    folder = tmp_path / "disturbed"
    run = run_cluster(
        folder,
        "--only-first",
        inject="kill machine=1 iteration=5 point=backward microbatch=7",
        flags=["--flush-timeout", "1"],
        script=training(folder, WITHOUT_A_STORE),
    )
    assert_identical(run, undisturbed)
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["ahead"]) == ("replay", [2, 3])


def test_what_lets_all_replay_together_is_told_at_the_first_call(tmp_path: Path) -> None:
    """No log has it, and nobody is left whose state could be kept: a loss leads back to the checkpoint."""
    undisturbed = run_talking(tmp_path / "undisturbed", "--scatter")
    fault = "kill machine=1 iteration=5 point=forward microbatch=3"
    run = run_talking(tmp_path / "disturbed", "--scatter", inject=fault)
    assert_identical(run, undisturbed)
    for one in (undisturbed, run):
        (told,) = [line for line in one.output.splitlines() if "can only replay together" in line]
        assert re.search(r"talks\.py:\d+ \(main\) calls \w+ on a group of workers 0, 1, 2, 3, which", told)
        assert "After a loss all return to the last checkpoint" in told
    (recovery,) = run.recoveries
    assert recovery["mode"] == "fallback"
    assert re.search(r"no worker with a complete state is left; talks\.py:\d+ \(main\)", recovery["reason"])
