"""Runs a script that has a habit, undisturbed and with a fault, and compares what the runs leave behind.

A script of a habit is a small training in the form in which people write it. It gets the store as its first
argument and the name of the habit as its second one, and ends with :func:`leave`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import swift_ft
from tests.support.cluster import ClusterRun, assert_undisturbed, one_line, run_cluster
from tests.support.integrations import assert_same_files


def run_habit(
    folder: Path,
    script: Path,
    *habit: str,
    inject: str = "",
    machines: int = 2,
    flags: list[str] | None = None,
) -> ClusterRun:
    """Runs a script with one worker on each machine, and a spare.

    Args:
        folder: of the run; its store is in it.
        script: gets the store, then the habit.
        habit: further arguments.
        inject: faults. Each must strike.
        machines: that take part from the beginning.
        flags: further ones of ``swift-run``.
    """
    command = [str(script), str(folder / "store"), *habit]
    run = run_cluster(folder, inject=inject, machines=machines, flags=flags, script=command)
    asked = [part for part in inject.split(";") if part.strip()]
    if run.code == 0:
        assert len(run.events("FaultInjected")) == len(asked), run.output[-3000:]
    return run


def assert_put_back(
    folder: Path, script: Path, *habit: str, inject: str, machines: int = 2, flags: list[str] | None = None
) -> ClusterRun:
    """Checks that a run with faults leaves behind, bit for bit, what an undisturbed one does."""
    options: dict[str, Any] = {"machines": machines, "flags": flags}
    undisturbed = assert_undisturbed(run_habit(folder / "undisturbed", script, *habit, **options))
    run = run_habit(folder / "disturbed", script, *habit, inject=inject, **options)
    assert run.code == 0, run.output[-6000:]
    assert run.recoveries
    assert_same_files(run, undisturbed)
    return run


def refusal(folder: Path, script: Path, *habit: str, machines: int = 2, inject: str = "") -> str:
    """Checks that a run is refused, with exit code 2, and returns the line that says why.

    Args:
        folder, script, habit, machines: see :func:`run_habit`.
        inject: a fault that strikes first; without one, the run is undisturbed.
    """
    run = run_habit(folder, script, *habit, machines=machines, inject=inject)
    assert run.code == 2, run.output[-6000:]
    assert len(run.events("FaultInjected")) == bool(inject), run.output[-6000:]
    return one_line(run)


def attach(session: swift_ft.Session, model: nn.Module, *, pipeline: bool) -> Any:
    """In a script: the model is a DDP replica, or this worker's one of two stages.

    Returns:
        The schedule of the stages; None of replicas.
    """
    if not pipeline:
        session.attach_ddp(model)
        return None
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # takes time, and few need it

    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    session.attach_pipeline(schedule)
    return schedule


def leave(rank: int, state: Mapping[str, Any]) -> None:
    """In a script: write what a worker ends with, for the comparison."""
    folder = Path(os.environ["SWIFT_TEST_FOLDER"]) / "out"
    folder.mkdir(exist_ok=True)
    torch.save(dict(state), folder / f"rank{rank}.pt")
