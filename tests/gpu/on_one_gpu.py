"""Clusters whose workers share one GPU: each says to NCCL that it is on a host of its own.

The examples do (`examples/placement.py`). The variable SWIFT_GPU_TESTS=cpu rehearses them where there is no
GPU: on CPUs, over the backend that behaves like NCCL. It shows that the tests themselves work, and nothing
about GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_clean,
    assert_identical,
    run_cluster,
    training,
)
from tests.support.nccl_members import GPU, Statements
from tests.support.nccl_statements import expected_codes
from tests.support.worlds import CHANGES_WORLD, run_changed

REHEARSED = "SWIFT_GPU_TESTS"
LONG = 40
"""Iterations of a training that changes to another world."""


@dataclass(frozen=True)
class Kind:
    """An example, and how it is run.

    Attributes:
        machines: that take part.
        args: of the example.
        mode: of its recoveries.
    """

    machines: int
    args: tuple[str, ...]
    mode: str


KINDS = {
    "train_ddp": Kind(2, ("--layers=2", "--exact"), "replica"),
    "train_swift": Kind(3, (), "replay"),
    "train_hybrid": Kind(4, ("--layers=4", "--microbatches=4"), "replica"),
    "train_hsdp": Kind(4, ("--layers=2",), "replica"),
    "train_tensor_parallel": Kind(4, (), "replay"),
    "train_moe": Kind(4, ("--layers=2",), "replica"),
    "train_context_parallel": Kind(4, ("--layers=2",), "replica"),
    "train_elastic": Kind(3, (), "replay"),
    "train_elastic --pipelines=2": Kind(4, ("--exact",), "continue"),
}


class OnOneGpu:
    """Runs the examples, and keeps their undisturbed runs.

    Args:
        factory: of folders.
        device: of all workers.
    """

    def __init__(self, factory: pytest.TempPathFactory, device: str) -> None:
        self._factory = factory
        self._made: dict[tuple[str, ...], ClusterRun] = {}
        self.device = device

    def run(
        self,
        folder: Path,
        example: str,
        *args: str,
        inject: str = "",
        flags: list[str] | None = None,
        through: Path | None = None,
    ) -> ClusterRun:
        """Run an example, or a script that runs it."""
        kind = KINDS[example]
        name, *own = example.split()
        script = training(folder, through or EXAMPLES / f"{name}.py")
        options = (*own, *kind.args, "--device", self.device, *args)
        return run_cluster(
            folder, *options, inject=inject, machines=kind.machines, flags=flags, script=script
        )

    def changed(self, folder: Path, example: str, slots: list[int], **settings: Any) -> ClusterRun:
        """Run an example whose workers are replaced by those of a next world, on these machines."""
        kind = KINDS[example]
        _, *args = training(folder, CHANGES_WORLD, iterations=LONG)
        args += [*kind.args, "--device", self.device]
        return run_changed(folder, example, [(3, slots, [])], args, machines=kind.machines, **settings)

    def undisturbed(self, example: str, *args: str) -> ClusterRun:
        """The same without a failure, on the same device; made when first asked for."""
        what = (example, *args)
        if what not in self._made:
            run = self.run(self._factory.mktemp("undisturbed"), example, *args)
            assert run.code == 0, run.output[-6000:]
            assert not run.recoveries
            self._made[what] = run
        return self._made[what]

    def check_kill(self, folder: Path, example: str, at: str, *args: str) -> None:
        """Kill a machine, and compare with the undisturbed run."""
        killed = self.run(folder, example, *args, inject=f"kill {at}")
        assert_identical(killed, self.undisturbed(example, *args))
        assert_clean(killed)
        assert len(killed.events("FaultInjected")) == 1
        (recovery,) = killed.recoveries
        assert recovery["mode"] == KINDS[example].mode


def check_members() -> str:
    """Let two members of NCCL share the GPU. Returns what went wrong, and nothing if nothing did."""
    statements = Statements(GPU)
    try:
        ended = statements.run("runs_in_order", 2)
    finally:
        statements.close()
    return "" if ended.codes == expected_codes("runs_in_order") else f"{ended.codes}\n{ended.output}"
