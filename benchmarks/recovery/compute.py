"""The pure compute of a lost stage, measured in separate processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from examples.commands import finished
from examples.disturbed import Failure

STAGE = Path(__file__).parent / "scripts" / "stage.py"


@dataclass(frozen=True)
class PureCompute:
    """The lower bound of a replay on these cores: elapsed seconds and CPU seconds."""

    wall_s: float
    cpu_s: float


def pure_compute(
    failure: Failure, iterations: int, folder: Path, members: int = 1, *, exchange: bool = False
) -> PureCompute:
    """Measures ``iterations`` of the lost stage, shared by ``members`` processes that run at once.

    Args:
        failure: what was lost.
        iterations: in all.
        folder: for the output.
        members: that share the microbatches.
        exchange: they exchange gradients and parameters, as a program without any recovery would.
    """
    output = folder / "stage.txt"
    command = [sys.executable, str(STAGE), "--iterations", str(iterations)]
    command += ["--stage", str(failure.machine), "--stages", str(failure.machines)]
    command += ["--members", str(members), *failure.options]
    command += ["--exchange"] * exchange
    finished(command, output, OMP_NUM_THREADS="1")
    wall_s, cpu_s = map(float, output.read_text().split()[-2:])
    return PureCompute(wall_s, cpu_s)
