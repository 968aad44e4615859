"""The degrees of parallelism of the present world, for scripts that make meshes of their own."""

from __future__ import annotations

import os

from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import NotLaunchedError
from swift_ft.recovery.layout.degrees import Degrees, parse_degrees


def degrees(**first: int) -> Degrees:
    """The degrees with which this worker's world is to train.

    A script that makes its meshes of them can be changed while it runs (``swift-recover reshape``).

    Args:
        first: the degrees with which the run begins, by name: ``dp``, ``dp_shard``, ``pp``, ``tp``, ``cp``,
            ``ep``. Those that are missing are 1. One of them may be -1: as many as are left.

    Returns:
        Those that the last change has named, or else ``first``.

    Raises:
        UsageError: their product is not the number of workers, or a name is unknown.
    """
    named = ",".join(f"{name}={value}" for name, value in first.items())
    return parse_degrees(_of_world() or named, int(os.environ.get("WORLD_SIZE", "1")))


def _of_world() -> str:
    try:
        plan = WorkerContext.from_env().plan
    except NotLaunchedError:  # torchrun started it
        return ""
    return "" if plan.startswith("{") else plan
