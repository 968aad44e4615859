"""``swift-run`` where a guest takes long to archive the end of the journal, longer than its host."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NoReturn

from swift_ft.cli.run import run_and_exit
from swift_ft.launch import machine
from swift_ft.launch.agent import run_end
from swift_ft.launch.agent.run_end import RunEnd
from swift_ft.launch.settings import MachineJob
from swift_ft.recovery.job_state import State
from tests.support.waiting import wait_until

FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
SLOW_S = 2.0

run_guest, rename, tidy = machine._become_guest, Path.replace, RunEnd.tidy


def rename_slowly(path: Path, target: Path) -> Path:
    """The draft of a file is there for a while."""
    if "journal" in path.parts:
        time.sleep(SLOW_S)
    return rename(path, target)


def tidy_later(self: RunEnd, state: State, slot: int | None, limit_s: float) -> None:
    """Called in the host."""
    wait_until(lambda: any(FOLDER.glob("store/runs/*/journal/*.tmp")), "the guest's draft")
    tidy(self, state, slot, limit_s)


def become_slow_guest(job: MachineJob, slot: int, host: str, number: int) -> NoReturn:
    """Called in the process of the guest."""
    Path.replace = rename_slowly  # type: ignore[assignment]
    vars(run_end)["end_of"] = lambda spans: 0  # whatever its host has written by now
    RunEnd.tidy = tidy
    run_guest(job, slot, host, number)


if __name__ == "__main__":
    machine._become_guest = become_slow_guest
    RunEnd.tidy = tidy_later
    run_and_exit()
