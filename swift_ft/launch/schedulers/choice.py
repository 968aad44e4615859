"""The scheduler that ``--scheduler`` names."""

from __future__ import annotations

import shlex

from swift_ft.errors import UsageError
from swift_ft.launch.schedulers.command import CommandScheduler
from swift_ft.launch.schedulers.jobset import JobSetScheduler
from swift_ft.launch.schedulers.scheduler import RunPlace, Scheduler
from swift_ft.launch.schedulers.slurm import SlurmScheduler


def check_scheduler(name: str) -> None:
    """Check the value of ``--scheduler``.

    Raises:
        UsageError: if there is no such scheduler.
    """
    kind, colon, command = name.partition(":")
    try:
        known = bool(shlex.split(command)) if kind == "command" else not colon
    except ValueError:  # a quotation mark is missing
        known = False
    if kind not in ("slurm", "jobset", "command") or not known:
        raise UsageError(f"--scheduler {name!r}: choose slurm, jobset, or command:COMMAND.")


def scheduler_of(name: str, place: RunPlace) -> Scheduler:
    """The scheduler of a name that was checked."""
    kind, _, command = name.partition(":")
    match kind:
        case "slurm":
            return SlurmScheduler(place)
        case "jobset":
            return JobSetScheduler()
    return CommandScheduler(command, place)
