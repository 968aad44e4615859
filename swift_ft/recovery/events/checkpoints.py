"""Events of the journal about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPersisted:
    """A worker's part of a global checkpoint is in the store.

    ``epoch`` counts the fallbacks: parts of different histories never make one checkpoint. ``generation`` is
    the one in which the part was saved, even if the write ended in a later one. A part does not count if its
    worker was replaced since, or has undone the iteration. ``digest`` is that of the list of the part's
    files; empty if a replica saves the part for this worker.
    """

    rank: int
    iteration: int
    epoch: int
    generation: int
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The marker of a global checkpoint is in the store.

    Attributes:
        iteration: completed iterations.
        keep: committed checkpoints that this run keeps, including this one.
        earlier: older ones that a resumed run found in the store, oldest first.
    """

    iteration: int
    epoch: int
    keep: int = 1
    earlier: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged:
    """A worker's part of a committed checkpoint is not what was saved, or it is gone."""

    rank: int
    generation: int
    iteration: int
    reason: str


REQUESTED_AHEAD = 2
"""Iterations from a request to its early checkpoint. In the iteration between, all workers learn of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """A worker whose log nears its budget asks all workers to save before the regular checkpoint is due.

    It asks between two steps, so every other worker has completed as many iterations as it has, or one less.

    Attributes:
        rank: the worker that asks.
        iteration: completed iterations to save: :data:`REQUESTED_AHEAD` more than that worker has completed.
        generation: the one in which it trains.
        reason: why, in words.
    """

    rank: int
    iteration: int
    generation: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsDoubted:
    """All checkpoints after one may hold what a machine has computed wrong: all workers go back to that one.

    Attributes:
        generation: the one in which they train.
        iteration: completed iterations of the checkpoint to which they go back.
        reason: why, in words.
    """

    generation: int
    iteration: int
    reason: str
