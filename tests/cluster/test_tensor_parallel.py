"""Tensor parallelism inside the stages of a pipeline: on one machine, and across machines.

A worker's part of a stage has no replica and is no neighbour of the stage's other parts. What the parts
communicate is logged while it is little; otherwise they are rebuilt and replay together.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    ClusterRun,
    assert_clean,
    assert_identical,
    assert_undisturbed,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "tensor_parallel.py"
LITTLE = ["--layers=2", "--microbatches=4"]


def run_parallel(folder: Path, *args: str, inject: str = "", machines: int = 2) -> ClusterRun:
    """Two stages of two workers each: the ranks 0 and 1 have the first one."""
    flags = ["--nproc-per-node", str(4 // machines), "--spares", "2"]
    script = training(folder, SCRIPT)
    return run_cluster(folder, *LITTLE, *args, inject=inject, machines=machines, flags=flags, script=script)


def assert_seen(run: ClusterRun, reference: ClusterRun) -> None:
    """Losses and norms of the gradients, in each iteration that a worker computed in any of its lives."""
    for rank in range(4):
        expected, seen = (
            json.loads((one.folder / f"seen{rank}.json").read_text()) for one in (reference, run)
        )
        assert seen == {iteration: expected[iteration] for iteration in seen}, rank


def assert_replayed(run: ClusterRun, reference: ClusterRun, *ranks: int) -> dict[str, Any]:
    """Only these went back to the checkpoint, and the result is that of the undisturbed run."""
    assert_identical(run, reference)
    assert_clean(run)
    assert_seen(run, reference)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay", run.output[-3000:]
    assert set(recovery["replayed_iterations"]) == {str(rank) for rank in ranks}
    return dict(recovery)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_parallel(tmp_path_factory.mktemp("undisturbed")))


def plan_of(run: ClusterRun) -> list[str]:
    """What ``session.plan()`` says in the end of the script's groups, without sizes."""
    lines = (run.folder / "plan0.txt").read_text().splitlines()
    begin = "The script's group of "
    said = [line.removeprefix(begin) for line in lines if line.startswith(begin)]
    return [re.sub(r"[\d.]+ [kM]?B/iteration, ", "", line) for line in said]


def test_the_plan_says_which_group_goes_which_way(reference: ClusterRun) -> None:
    """The stages' norms are reduced over the pipelines; the parts of a stage are on one machine."""
    assert plan_of(reference) == [
        "workers 0 and 1: replayed together",
        "workers 0 and 2: logged",
        "workers 1 and 3: logged",
        "workers 2 and 3: replayed together",
    ]


@pytest.mark.parametrize(
    ("machine", "at"),
    [
        (0, "iteration=5 point=backward microbatch=1"),
        (1, "iteration=5 point=forward microbatch=2"),
        (1, "iteration=4 point=optimizer"),
        (0, "iteration=5 point=between"),
    ],
)
def test_a_machine_with_a_whole_stage(machine: int, at: str, tmp_path: Path, reference: ClusterRun) -> None:
    """Its workers are lost together and replay together. The others may be one iteration apart."""
    run = run_parallel(tmp_path, "--exact", inject=f"kill machine={machine} {at}")
    assert_replayed(run, reference, 2 * machine, 2 * machine + 1)


@pytest.mark.parametrize("machine", [1, 2])
def test_a_part_of_a_stage_whose_communication_is_logged(
    machine: int, tmp_path: Path, reference: ClusterRun
) -> None:
    """It replays alone: another part's log has what they communicated."""
    fault = f"kill machine={machine} iteration=5 point=forward microbatch=2"
    run = run_parallel(tmp_path, "--exact", inject=fault, machines=4)
    assert_replayed(run, reference, machine)


@pytest.mark.parametrize(
    ("machine", "at"),
    [
        (0, "iteration=5 point=forward microbatch=2"),
        (1, "iteration=5 point=optimizer"),
        (3, "iteration=5 point=backward microbatch=1"),
    ],
)
def test_a_part_of_a_stage_that_communicates_more(
    machine: int, at: str, tmp_path: Path, reference: ClusterRun
) -> None:
    """The survivor with the other part goes back, too, and both replay. The other stage keeps its state."""
    run = run_parallel(tmp_path, "--exact", "--limit=20kB", inject=f"kill machine={machine} {at}", machines=4)
    stage = machine // 2
    assert_replayed(run, reference, 2 * stage, 2 * stage + 1)


def test_parts_that_swap_messages(tmp_path: Path) -> None:
    """In batches on the group of all workers, whose other members have no part in the replay."""
    swap = ("--exact", "--swap", "--limit=20kB")
    undisturbed = run_parallel(tmp_path / "undisturbed", *swap, machines=4)
    fault = "kill machine=3 iteration=5 point=backward microbatch=1"
    run = run_parallel(tmp_path / "disturbed", *swap, inject=fault, machines=4)
    assert_replayed(run, undisturbed, 2, 3)


def test_both_parts_are_lost_one_after_the_other(tmp_path: Path, reference: ClusterRun) -> None:
    """The second one while it replays with the first one's replacement."""
    faults = "kill machine=2 iteration=5 point=forward microbatch=2; kill machine=3 iteration=4 point=replay"
    run = run_parallel(tmp_path, "--exact", "--limit=20kB", inject=faults, machines=4)
    assert_identical(run, reference)
    assert_clean(run)
    assert_seen(run, reference)
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}


def test_parts_that_end_one_iteration_apart(tmp_path: Path, reference: ClusterRun) -> None:
    """Rank 0 has completed what rank 1 repeats, which takes both: it undoes its update."""
    run = run_parallel(tmp_path, "--exact", "--apart")
    recovery = assert_replayed(run, reference, 2, 3)
    assert set(recovery["undone"]) == {"0"}
