"""Failpoints: named places in a worker's life where a fault can be injected. Free when unused.

The code calls :func:`hit` at each place. That costs one comparison unless a listener is installed, which is
so only where faults were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Point(StrEnum):
    """A point in an iteration, or in a recovery."""

    FORWARD = "forward"
    """Before the forward pass of a microbatch."""
    BACKWARD = "backward"
    """Before the backward pass of a microbatch."""
    REDUCE = "reduce"
    """A bucket of gradients is full on this worker; its all-reduce has not begun."""
    REDUCING = "reducing"
    """The all-reduce of a bucket has begun."""
    REDUCED = "reduced"
    """The all-reduce of a bucket is complete on this worker."""
    UPDATE = "update"
    """The parameters of a bucket are updated, where the optimizer is wait-free."""
    OPTIMIZER = "optimizer"
    """At the end of ``optimizer.step()``: the update is done, and nothing else depends on it yet."""
    VERIFY = "verify"
    """A step that is verified was computed twice, or three times, and all workers are about to compare."""
    BETWEEN = "between"
    """After the iteration, before the next one."""
    CHECKPOINT = "checkpoint"
    """This worker's part of the checkpoint after ``iteration`` is written but not yet reported."""
    COPY = "copy"
    """A copy of the state after ``iteration`` is about to go to the memory of another machine."""
    COMMIT = "commit"
    """All parts are in the store, but the marker is not written yet (worker 0)."""
    START = "start"
    """As the job starts, before its first group is formed.

    Here, and at ``end``, ``leave``, ``report`` and ``join``, ``iteration`` is the number of iterations that
    the worker has completed.
    """
    END = "end"
    """After the last iteration, before the worker says that it has completed them all."""
    LEAVE = "leave"
    """In a recovery: the worker has left its group and has no order yet."""
    REPORT = "report"
    """In a recovery, before the worker reports its status; a replacement is at iteration 0."""
    JOIN = "join"
    """In a recovery, before the group of the new generation is formed."""
    LOAD = "load"
    """In a recovery, before the checkpoint is loaded."""
    TRANSFER = "transfer"
    """In a recovery, before a bucket of state travels from a replica to others."""
    MOVE = "move"
    """Before layers travel from one worker to another, in a change of the layout."""
    PREPARED = "prepared"
    """In a worker of the next world, before it says that it waits for its state."""
    OFFER = "offer"
    """All stop for the next world, before this worker offers its state."""
    TAKE = "take"
    """In a worker of the next world, before it takes its state."""
    REPLAY = "replay"
    """In a replay, when ``iteration`` begins."""
    HELP = "help"
    """In a replay of other workers, when a helper begins ``iteration``."""


Listener = Callable[[Point, int, int | None], None]
"""Called with the point, the iteration, and the microbatch or the bucket, if there is one."""

_listener: Listener | None = None


def hit(point: Point, iteration: int, part: int | None = None) -> None:
    """Mark that this worker is at a point; ``part`` is the microbatch or the bucket."""
    if _listener is not None:
        _listener(point, iteration, part)


def listen(listener: Listener | None) -> None:
    """Install the listener that :func:`hit` calls. None removes it."""
    global _listener
    _listener = listener
