"""``--scheduler command:COMMAND``: any scheduler, by a command of the user's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from swift_ft.launch.schedulers.scheduler import RunPlace, run_tool


class CommandScheduler:
    """Runs the command as ``COMMAND ask`` and ``COMMAND give-back``, with facts in its environment.

    ``SWIFT_COUNT`` is the number of machines, ``SWIFT_REASON`` why they are asked for, ``SWIFT_EXCLUDE`` the
    names of nodes that the run refuses, ``SWIFT_MACHINES`` those that are given back. ``SWIFT_RUN``,
    ``SWIFT_ENDPOINT`` and ``SWIFT_LAUNCH`` are the run, its rendezvous store, and the command that starts a
    machine of it, for a shell.

    Args:
        command: its words, as a shell reads them.
        place: the run.
    """

    def __init__(self, command: str, place: RunPlace) -> None:
        self._command = shlex.split(command)
        self._facts = {
            "SWIFT_RUN": place.run_id,
            "SWIFT_ENDPOINT": place.endpoint,
            "SWIFT_LAUNCH": shlex.join(place.launch),
        }

    def ask(self, count: int, reason: str, exclude: Sequence[str] = ()) -> None:
        """See :class:`Scheduler`."""
        asked = {"SWIFT_COUNT": str(count), "SWIFT_REASON": reason, "SWIFT_MACHINES": ""}
        run_tool([*self._command, "ask"], {**self._facts, **asked, "SWIFT_EXCLUDE": " ".join(exclude)})

    def give_back(self, machines: Sequence[str]) -> None:
        """See :class:`Scheduler`."""
        given = {"SWIFT_COUNT": str(len(machines)), "SWIFT_REASON": "", "SWIFT_MACHINES": " ".join(machines)}
        run_tool([*self._command, "give-back"], {**self._facts, **given})
