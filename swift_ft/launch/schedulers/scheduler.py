"""The interface of a scheduler, and the one way in which its tools are run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swift_ft.errors import SchedulerError

LIMIT_S = 60.0
"""The longest time that one run of a scheduler's tool may take."""


class Scheduler(Protocol):
    """Asks for machines and gives them back. Called in a thread that may wait."""

    def ask(self, count: int, reason: str, exclude: Sequence[str] = ()) -> None:
        """Ask for machines that join this run. Returns before they are there.

        Args:
            count: number of machines.
            reason: why they are asked for.
            exclude: nodes that the run refuses, if the scheduler can leave them out.

        Raises:
            SchedulerError: if the scheduler cannot be asked, or refuses.
        """

    def give_back(self, machines: Sequence[str]) -> None:
        """Give back machines that have left the run. Called by the launcher of each, about to end.

        Raises:
            SchedulerError: if the scheduler cannot be told, or refuses.
        """


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A run, for whoever is to start one more machine of it.

    Attributes:
        run_id: its name with its number.
        endpoint: its rendezvous store.
        launch: the command that starts a machine: this launcher's own.
    """

    run_id: str
    endpoint: str
    launch: tuple[str, ...]


def run_tool(
    command: Sequence[str], env: Mapping[str, str] | None = None, *, limit_s: float = LIMIT_S
) -> str:
    """Run a tool of the scheduler.

    Args:
        command: its words.
        env: variables besides this process's own.
        limit_s: seconds after which it is killed.

    Returns:
        What it has printed.

    Raises:
        SchedulerError: if it is not there, fails, or takes too long.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SchedulerError(f"there is no {name} on this host") from error
    except OSError as error:
        raise SchedulerError(f"{name} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{name} was killed after {limit_s:g} s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = f": {said[-1]}" if said else ""
        raise SchedulerError(f"{name} ended with exit code {done.returncode}{last}")
    return done.stdout.decode(errors="replace")
