"""Recoveries over a backend that behaves like NCCL: dead peers are silent, and only aborts end waits.

`make test-nccl-like` also runs the kill matrix of other files over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_experts_and_context import DEATH_AT, TRAININGS, WITH_DROPOUT, train
from tests.cluster.test_layouts import ALONE, EVEN, LONG, LOST, moves
from tests.support.cluster import (
    BACKEND,
    EXAMPLES,
    ITERATIONS,
    ClusterRun,
    assert_clean,
    assert_identical,
    assert_same_layers,
    once,
    run_cluster,
    training,
)
from tests.support.integrations import assert_same_files

Undisturbed = Callable[[str], ClusterRun]

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Kind:
    """A script, and how it is run.

    Attributes:
        script: an example, or one of the tests.
        machines: that take part.
        args: of the script.
        flags: of the launcher.
        mode: of its recoveries.
        iterations: that it trains for.
    """

    script: Path
    machines: int
    args: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    mode: str = "replay"
    iterations: int = ITERATIONS


KINDS = {
    "ddp": Kind(EXAMPLES / "train_ddp.py", 2, ("--layers=2",), mode="replica"),
    "pipeline": Kind(EXAMPLES / "train_swift.py", 4),
    "hybrid": Kind(EXAMPLES / "train_hybrid.py", 4, ("--layers=4", "--microbatches=4"), mode="replica"),
    "hsdp": Kind(EXAMPLES / "train_hsdp.py", 4, ("--layers=2",), mode="replica"),
    "tensor parallel": Kind(
        SCRIPTS / "tensor_parallel.py",
        4,
        ("--layers=2", "--microbatches=4", "--exact", "--swap", "--limit=20kB"),
    ),
    "layers": Kind(EVEN, 3, flags=tuple(ALONE), iterations=LONG),
    "shared layers": Kind(EXAMPLES / "train_elastic.py", 4, ("--pipelines=2", "--exact"), mode="replica"),
    "between steps": Kind(SCRIPTS / "between_steps.py", 4),
}
AHEAD = "nccl_like_ahead"


def run(folder: Path, kind: str, inject: str = "", *flags: str, **options: Any) -> ClusterRun:
    one = KINDS[kind]
    script = training(folder, one.script, iterations=one.iterations)
    return over_nccl(
        folder,
        *one.args,
        inject=inject,
        machines=one.machines,
        flags=[*one.flags, *flags],
        script=script,
        **options,
    )


def over_nccl(folder: Path, *args: str, backend: str = "nccl_like", **options: Any) -> ClusterRun:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(BACKEND, backend)
        return run_cluster(folder, *args, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Undisturbed runs over the same backend."""
    return once(tmp_path_factory, run)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("ddp", "machine=1 iteration=5 point=reducing bucket=0"),
        ("ddp", "machine=0 iteration=5 point=optimizer"),
        ("ddp", "machine=1 iteration=4 point=between"),
        ("pipeline", "machine=1 iteration=5 point=backward microbatch=7"),  # a stage is ahead, and repeats
        ("pipeline", "machine=2 iteration=5 point=forward microbatch=0"),
        ("pipeline", "machine=3 iteration=5 point=optimizer"),
        ("hybrid", "machine=2 iteration=5 point=backward microbatch=3"),
        ("hybrid", "machine=3 iteration=5 point=reducing"),
        ("hybrid", "machine=1 iteration=5 point=optimizer"),
        ("hsdp", "machine=3 iteration=5 point=optimizer"),
        ("tensor parallel", "machine=3 iteration=5 point=backward microbatch=1"),  # two replay together
    ],
)
def test_a_kill(kind: str, at: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    killed = run(tmp_path, kind, f"kill {at}")
    assert_identical(killed, undisturbed(kind))
    assert_clean(killed)
    assert len(killed.events("FaultInjected")) == 1
    (recovery,) = killed.recoveries
    assert recovery["mode"] == KINDS[kind].mode


@pytest.mark.parametrize(
    ("flags", "helpers"),
    [
        pytest.param([*ALONE, "--helpers", "0"], [], id="a guest takes the lost stage"),
        pytest.param(["--helpers", "9"], [0, 2, 3], id="all others help in the replay"),
    ],
)
def test_survivors_do_more(
    flags: list[str], helpers: list[int], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    killed = run(tmp_path, "pipeline", "kill machine=1 iteration=5 point=forward microbatch=3", *flags)
    assert_identical(killed, undisturbed("pipeline"))
    (recovery,) = killed.recoveries
    assert (recovery["mode"], recovery["helpers"]) == ("replay", helpers)
    assert ("runs the workers of machine 1, too" in killed.output) == (not helpers)


def test_layers_move(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """From a machine that has two stages to the other one."""
    killed = run(tmp_path, "layers", LOST)
    assert_same_layers(killed, undisturbed("layers"))
    assert moves(killed) == 1
    assert len(killed.events("FaultInjected")) == 1


def test_a_memory_checkpoint(tmp_path: Path) -> None:
    """The copy in another worker's memory, in which the lost one's state comes back."""
    runs = []
    for folder, inject in (
        (tmp_path / "undisturbed", ""),
        (tmp_path / "killed", "kill machine=1 iteration=12 point=forward"),
    ):
        script = [
            str(SCRIPTS / "by_hand.py"),
            "--store",
            str(folder / "store"),
            "--weights-out",
            str(folder / "weights"),
        ]
        runs.append(over_nccl(folder, "--settle", inject=inject, machines=2, script=script))
    undisturbed, killed = runs
    assert_identical(killed, undisturbed)
    assert [recovery["mode"] for recovery in killed.recoveries] == ["memory"]


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("pipeline", "machine=1 iteration=5 point=backward microbatch=7"),
        ("pipeline", "machine=2 iteration=5 point=forward microbatch=2"),
        ("hsdp", "machine=3 iteration=5 point=optimizer"),
        ("hybrid", "machine=2 iteration=5 point=backward microbatch=3"),
        ("tensor parallel", "machine=3 iteration=5 point=backward microbatch=1"),
        ("shared layers", "machine=1 iteration=5 point=forward microbatch=1"),
        ("shared layers", "machine=2 iteration=5 point=reducing"),
    ],
)
def test_the_host_runs_ahead(kind: str, at: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """An abort leaves garbage, and no wait of an operation says so: as with GPUs."""
    killed = run(tmp_path, kind, f"kill {at}", backend=AHEAD)
    assert_identical(killed, undisturbed(kind))
    assert_clean(killed)
    assert len(killed.events("FaultInjected")) == 1
    (recovery,) = killed.recoveries
    assert recovery["mode"] == KINDS[kind].mode


def test_a_size_that_an_abort_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tokens come to an expert is read on the host, and memory of that size is asked for."""
    monkeypatch.setenv(BACKEND, AHEAD)
    experts = TRAININGS["experts in two replicas"]
    undisturbed = train(tmp_path / "undisturbed", experts, *WITH_DROPOUT)
    death = {"rank": 1, "iteration": DEATH_AT, "point": "before all_to_all 1"}
    killed = train(tmp_path / "killed", experts, *WITH_DROPOUT, death=death)
    assert killed.code == 0, killed.output[-6000:]
    assert [recovery["mode"] for recovery in killed.recoveries] == [experts.way], killed.output[-3000:]
    assert_same_files(killed, undisturbed)


def test_no_log_has_what_an_abort_has_left(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The second loss leads back to the iteration that the first one has interrupted, in two logs."""
    faults = [f"kill machine=2 iteration={number} point=forward microbatch=2" for number in (4, 5)]
    killed = run(tmp_path, "pipeline", "; ".join(faults), "--spares", "2", backend=AHEAD)
    assert_identical(killed, undisturbed("pipeline"))
    assert len(killed.events("FaultInjected")) == 2
    assert [recovery["mode"] for recovery in killed.recoveries] == ["replay", "replay"]


def test_a_number_that_an_abort_has_left_between_two_steps(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Each of three survivors reads another one. The script is not to blame for that."""
    one = KINDS["between steps"]
    script = training(tmp_path, one.script)
    killed = over_nccl(tmp_path, "--die", "validate:4:1", machines=one.machines, script=script, backend=AHEAD)
    assert_identical(killed, undisturbed("between steps"))
    assert (tmp_path / "died").exists()
    (recovery,) = killed.recoveries
    assert (recovery["mode"], recovery["slots"]) == ("replay", [1])
