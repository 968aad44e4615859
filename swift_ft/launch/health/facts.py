"""The facts that a health check is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class ClockReading(NamedTuple):
    """The wall clock of another machine, compared with this one's.

    Attributes:
        address: (``host:port``), at which it was asked.
        ahead_s: by how many seconds its clock is ahead of this one's; negative if it is behind.
        error_s: the most by which that may be wrong.
    """

    address: str
    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """A machine that offers itself, as its health checks see it.

    Attributes:
        machine: its name in the run.
        after_loss: it was lost in this run, and comes back.
        folder: of its temporary files: ``TMPDIR``, or ``/tmp`` without it. That of ``--log-dir`` may be of a
            server that all share.
        others: addresses (``host:port``) of machines that take part, to which it will connect.
        workers: that run on it, with an accelerator each if they use any; 0 if that is unknown.
        clocks: of some other machines; empty if none is there or answers in time, and if neither ``clock``
            nor a check of the user's own is asked for.
    """

    machine: str
    after_loss: bool
    folder: str
    others: tuple[str, ...] = ()
    workers: int = 0
    clocks: tuple[ClockReading, ...] = ()


HealthCheck = Callable[[HealthFacts], str]
"""Says what is wrong with this machine; empty if nothing is. It runs in a process of its own."""
