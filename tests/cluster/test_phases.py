"""A further machine fails in each phase of a recovery, whatever the workers share a model by.

All of them are thorough; `make test-nccl-like` runs them over a backend that behaves like NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_clean,
    assert_identical,
    once,
    run_cluster,
    training,
)

SCRIPTS = Path(__file__).parent / "scripts"

Undisturbed = Callable[[str], ClusterRun]


@dataclass(frozen=True)
class Topology:
    """How a model is shared, and what happens to it first.

    Attributes:
        script: that trains.
        args: of the script.
        machines: with a worker each.
        first: the first loss.
        lost: its machine.
        next: the machine that is lost next, if it is another one.
        done: how many iterations that one has completed by then.
        modes: how recoveries go back. Where both replicas of a state are lost, there is none to copy.
    """

    script: Path
    args: tuple[str, ...]
    machines: int
    first: str
    lost: int
    next: int
    done: int = 5
    modes: frozenset[str] = frozenset({"replay"})


REPLICAS = frozenset({"replica"})

TOPOLOGIES = {
    "pipeline": Topology(
        EXAMPLES / "train_swift.py", (), 4, "kill machine=1 iteration=5 point=backward microbatch=7", 1, 2, 6
    ),
    "tensor parallel": Topology(
        SCRIPTS / "tensor_parallel.py",
        ("--layers=2", "--microbatches=4", "--exact", "--limit=20kB"),
        4,
        "kill machine=3 iteration=5 point=backward microbatch=1",
        3,
        2,
    ),
    "ddp": Topology(
        EXAMPLES / "train_ddp.py",
        ("--layers=2",),
        3,
        "kill machine=1 iteration=5 point=reduce bucket=0",
        1,
        0,
        modes=REPLICAS,
    ),
    "ddp, undone": Topology(
        EXAMPLES / "train_ddp.py",
        ("--layers=4", "--bucket-mb=0.01", "--optimizer=AdamW", "--wait-free", "--exact"),
        3,
        "kill machine=1 iteration=5 point=update bucket=1",
        1,
        0,
        modes=REPLICAS,
    ),
    "hybrid": Topology(
        EXAMPLES / "train_hybrid.py",
        ("--layers=4", "--microbatches=4"),
        4,
        "kill machine=2 iteration=5 point=backward microbatch=3",
        2,
        1,
        6,
        REPLICAS,
    ),
    "hsdp": Topology(
        EXAMPLES / "train_hsdp.py",
        ("--layers=2",),
        4,
        "kill machine=3 iteration=5 point=optimizer",
        3,
        0,
        6,
        REPLICAS,
    ),
}

NEXT = {
    "it leaves its groups": "kill machine={next} iteration={done} point=leave",
    "it is about to report": "kill machine={next} iteration={done} point=report",
    "groups form, without a survivor": "kill machine={next} iteration={done} point=join",
    "training goes on": "kill machine={next} iteration=7 point=optimizer",
}
"""What happens to the machine that is lost next, in every topology."""

NEXT_OF_A_REPLAY = {
    "the checkpoint is loaded": "kill machine={lost} iteration=any point=load",
    "it replays": "kill machine={lost} iteration=4 point=replay",
    "groups form, without the replacement": "kill machine={lost} iteration=5 point=join",
}

NEXT_OF_A_COPY = {"state is copied": "kill machine={lost} iteration=0 point=transfer"}


def phases_of(topology: str) -> dict[str, str]:
    return NEXT | (NEXT_OF_A_COPY if TOPOLOGIES[topology].modes == REPLICAS else NEXT_OF_A_REPLAY)


def run(folder: Path, topology: str, inject: str = "") -> ClusterRun:
    one = TOPOLOGIES[topology]
    script = training(folder, one.script)
    return run_cluster(
        folder, *one.args, inject=inject, machines=one.machines, flags=["--spares", "2"], script=script
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return once(tmp_path_factory, run)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("topology", "phase"), [(topology, phase) for topology in TOPOLOGIES for phase in phases_of(topology)]
)
def test_a_further_loss_when(topology: str, phase: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    one = TOPOLOGIES[topology]
    second = phases_of(topology)[phase].format(lost=one.lost, next=one.next, done=one.done)
    disturbed = run(tmp_path, topology, f"{one.first}; {second}")
    assert_identical(disturbed, undisturbed(topology))
    assert_clean(disturbed)
    assert len(disturbed.events("FaultInjected")) == 2, disturbed.output[-3000:]
    assert {recovery["mode"] for recovery in disturbed.recoveries} == one.modes, disturbed.output[-3000:]
    if topology == "ddp, undone":
        assert any(recovery["undone"] for recovery in disturbed.recoveries)
