"""The facts that a health check is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
    """

    machine: str
    after_loss: bool
    folder: str
    others: tuple[str, ...] = ()
    workers: int = 0


HealthCheck = Callable[[HealthFacts], str]
"""Says what is wrong with this machine; empty if nothing is. It runs in a process of its own."""
