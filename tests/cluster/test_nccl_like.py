"""Recoveries over a backend that behaves like NCCL: dead peers are silent, and only aborts end waits.

`make test-nccl-like` also runs the kill matrix of other files over it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import (
    BACKEND,
    EXAMPLES,
    ClusterRun,
    assert_clean,
    assert_identical,
    run_cluster,
    training,
)

Undisturbed = Callable[[str], ClusterRun]


class Kind:
    """An example, and how it is run.

    Args:
        machines: that take part.
        args: of the example.
        mode: of its recoveries.
    """

    def __init__(self, machines: int, *args: str, mode: str) -> None:
        self.machines, self.args, self.mode = machines, args, mode


KINDS = {
    "train_ddp": Kind(2, "--layers=2", mode="replica"),
    "train_swift": Kind(4, mode="replay"),
    "train_hybrid": Kind(4, "--layers=4", "--microbatches=4", mode="replica"),
    "train_hsdp": Kind(4, "--layers=2", mode="replica"),
}


def run(folder: Path, example: str, inject: str = "") -> ClusterRun:
    kind = KINDS[example]
    script = training(folder, EXAMPLES / f"{example}.py")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(BACKEND, "nccl_like")
        return run_cluster(folder, *kind.args, inject=inject, machines=kind.machines, script=script)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Undisturbed runs over the same backend, made when first asked for."""
    made: dict[str, ClusterRun] = {}

    def reference(example: str) -> ClusterRun:
        if example not in made:
            made[example] = run(tmp_path_factory.mktemp("undisturbed"), example)
            assert made[example].code == 0, made[example].output[-6000:]
            assert not made[example].recoveries
        return made[example]

    return reference


@pytest.mark.parametrize(
    ("example", "at"),
    [
        ("train_ddp", "machine=1 iteration=5 point=reducing bucket=0"),
        ("train_ddp", "machine=0 iteration=5 point=optimizer"),
        ("train_ddp", "machine=1 iteration=4 point=between"),
        ("train_swift", "machine=1 iteration=5 point=backward microbatch=7"),  # a stage is ahead, and repeats
        ("train_swift", "machine=2 iteration=5 point=forward microbatch=0"),
        ("train_swift", "machine=3 iteration=5 point=optimizer"),
        ("train_hybrid", "machine=2 iteration=5 point=backward microbatch=3"),
        ("train_hybrid", "machine=3 iteration=5 point=reducing"),
        ("train_hybrid", "machine=1 iteration=5 point=optimizer"),
        ("train_hsdp", "machine=3 iteration=5 point=optimizer"),
    ],
)
def test_a_kill(example: str, at: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    killed = run(tmp_path, example, f"kill {at}")
    assert_identical(killed, undisturbed(example))
    assert_clean(killed)
    assert len(killed.events("FaultInjected")) == 1
    (recovery,) = killed.recoveries
    assert recovery["mode"] == KINDS[example].mode
