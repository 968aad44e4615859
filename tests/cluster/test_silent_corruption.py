"""A machine computes wrong without any error: a verified step finds it, and the right result counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_computed_twice,
    assert_identical,
    once,
    one_line,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "computes_wrong.py"
MACHINES = {"train_ddp": 2, "train_swift": 3, "train_fsdp": 2, "train_elastic": 2, "train_hybrid": 4}
VERIFY = ["--verify", "replay", "--verify-every", "2"]
SMALLER = ["--layers=4", "--microbatches=4"]

Reference = Callable[[str], ClusterRun]


@pytest.fixture(scope="session")
def unverified(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs of examples, in which nothing is computed twice."""

    def run(folder: Path, example: str) -> ClusterRun:
        script = training(folder, EXAMPLES / f"{example}.py")
        return run_cluster(folder, *SMALLER, machines=MACHINES[example], script=script)

    return once(tmp_path_factory, run)


@pytest.fixture
def wrong_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClusterRun]:
    """Runs an example on a machine that computes wrong."""

    def run(example: str, *flags: str, struck: int = 1, **wrong: Any) -> ClusterRun:
        monkeypatch.setenv("WRONG", json.dumps({"example": example, "iteration": 5, **wrong}))
        script = training(tmp_path, SCRIPT)
        machines = MACHINES[example]
        found = run_cluster(tmp_path, *SMALLER, flags=[*VERIFY, *flags], machines=machines, script=script)
        assert len([*tmp_path.glob("struck-*")]) == struck
        return found

    return run


def found_in(run: ClusterRun) -> tuple[list[int], str, bool]:
    """Whom the one event of the run names, the kind, and whether what counts is right."""
    (event,) = run.events("StepDiffered")
    assert event["iteration"] == 5
    return event["ranks"], event["kind"], event["right"]


@pytest.mark.parametrize(
    ("example", "fault"),
    [
        ("train_ddp", ""),
        ("train_swift", ""),
        ("train_fsdp", ""),
        # The comparison is interrupted, and so is a verified step after its optimizer's update.
        ("train_ddp", "kill machine=1 iteration=5 point=verify"),
        ("train_swift", "kill machine=1 iteration=5 point=verify"),
        pytest.param("train_swift", "break worker=1 iteration=5 point=verify", marks=pytest.mark.thorough),
        pytest.param("train_ddp", "kill machine=0 iteration=5 point=optimizer", marks=pytest.mark.thorough),
        pytest.param("train_swift", "kill machine=0 iteration=5 point=optimizer", marks=pytest.mark.thorough),
        pytest.param("train_elastic", "", marks=pytest.mark.thorough),
        pytest.param("train_hybrid", "", marks=pytest.mark.thorough),
    ],
)
def test_a_right_step_computed_twice_changes_no_bit(
    example: str, fault: str, tmp_path: Path, unverified: Reference
) -> None:
    script = training(tmp_path, EXAMPLES / f"{example}.py")
    machines = MACHINES[example]
    run = run_cluster(tmp_path, *SMALLER, flags=VERIFY, inject=fault, machines=machines, script=script)
    assert_identical(run, unverified(example))
    assert run.events("StepDiffered") == []
    assert len(run.recoveries) == bool(fault)
    assert_computed_twice(run, 3)


@pytest.mark.parametrize(
    ("example", "wrong", "rank"),
    [
        ("train_ddp", {"what": "product", "rank": 1}, 1),
        ("train_ddp", {"what": "parameter", "rank": 1, "times": [2]}, 1),
        ("train_swift", {"what": "message", "rank": 1}, 1),
        ("train_fsdp", {"what": "product", "rank": 1}, 1),
        pytest.param(
            "train_swift", {"what": "product", "rank": 0, "times": [2]}, 0, marks=pytest.mark.thorough
        ),
        pytest.param(
            "train_ddp", {"what": "product", "rank": 0, "times": [2]}, 0, marks=pytest.mark.thorough
        ),
        pytest.param("train_elastic", {"what": "product", "rank": 1}, 1, marks=pytest.mark.thorough),
        pytest.param("train_hybrid", {"what": "product", "rank": 0}, 0, marks=pytest.mark.thorough),
    ],
)
def test_a_wrong_result_is_found_and_does_not_count(
    example: str,
    wrong: dict[str, Any],
    rank: int,
    wrong_run: Callable[..., ClusterRun],
    unverified: Reference,
) -> None:
    """Once, in a matrix product, a parameter, or a message before its checksum."""
    run = wrong_run(example, **wrong)
    assert found_in(run) == ([rank], "once", True)
    assert f"machine {rank} has computed iteration 5 wrong" in run.output
    assert_identical(run, unverified(example))


def test_a_wrong_average_is_nobodys_fault(
    wrong_run: Callable[..., ClusterRun], unverified: Reference
) -> None:
    run = wrong_run("train_ddp", "--on-corruption", "stop", what="average", rank=-1, struck=2)
    assert found_in(run) == ([], "once", True)
    assert "something was changed between machines in iteration 5: the average of " in run.output
    assert_identical(run, unverified("train_ddp"))


@pytest.mark.thorough
def test_two_workers_of_a_machine_are_one_machine(wrong_run: Callable[..., ClusterRun]) -> None:
    flags = ("--nproc-per-node", "2", "--on-corruption", "stop")
    run = wrong_run("train_ddp", *flags, what="product", rank=2, ranks=[2, 3], struck=2)
    assert run.code == 1
    assert found_in(run) == ([2, 3], "once", True)
    assert "machine 1 has computed iteration 5 wrong" in one_line(run)


def test_a_machine_that_is_wrong_each_time_is_named_and_leaves(wrong_run: Callable[..., ClusterRun]) -> None:
    wrong = {"what": "product", "rank": 1, "times": [1, 2, 3]}
    run = wrong_run("train_ddp", "--on-corruption", "drain", struck=3, **wrong)
    assert run.code == 0, run.output[-3000:]
    assert found_in(run) == ([1], "each time", False)
    (asked,) = run.events("DrainRequested")
    joined = {event["machine"]: event["preferred_slot"] for event in run.events("MachineJoined")}
    assert joined[asked["machine"]] == 1


def test_the_job_ends_if_that_is_asked_for(wrong_run: Callable[..., ClusterRun]) -> None:
    run = wrong_run("train_ddp", "--on-corruption", "stop", what="product", rank=0)
    assert run.code == 1
    assert "machine 0 has computed iteration 5 wrong" in one_line(run)


def test_a_step_that_is_not_deterministic_names_no_machine(wrong_run: Callable[..., ClusterRun]) -> None:
    run = wrong_run(
        "train_ddp", "--on-corruption", "stop", what="product", rank=-1, times=[1, 2, 3], struck=6
    )
    assert run.code == 0, run.output[-3000:]
    assert found_in(run) == ([0, 1], "not deterministic", False)
    assert "Nothing shows that a machine is at fault" in run.output
