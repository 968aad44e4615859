"""Events of the journal about layers and batches that move between workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequested:
    """Layers are to be redistributed among the stages, before an iteration that all workers are yet to begin.

    Attributes:
        rank: the worker that asks.
        generation: the one in which it trains.
        iteration: completed iterations at which all workers stop for it: :data:`REQUESTED_AHEAD` more than
            that worker has completed.
        layers: the number of layers of each stage, in the pipeline's order.
        reason: why, in words.
    """

    rank: int
    generation: int
    iteration: int
    layers: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesRequested:
    """Replicas are to get other shares of global batches, before an iteration that all are yet to begin.

    Attributes:
        rank: the worker that asks.
        generation: the one in which it trains.
        iteration: completed iterations at which all workers stop for it: :data:`REQUESTED_AHEAD` more than
            that worker has completed.
        shares: samples of each replica in a global batch.
        reason: why, in words.
    """

    rank: int
    generation: int
    iteration: int
    shares: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBoundaryReached:
    """A worker has completed the iterations before a change of layers or shares, and waits for the others."""

    rank: int
    generation: int
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDeclined:
    """A worker cannot take or give layers: it has too little memory, or the script cannot build one."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceNoted:
    """A worker has become persistently slower than its peers, or is so no more.

    Attributes:
        rank: the worker.
        generation: the one in which it trains.
        iteration: iterations that it has completed.
        permille: how long it takes for its own work, in thousandths of what its peers would take; at most
            1000 if it is slower no more.
    """

    rank: int
    generation: int
    iteration: int
    permille: int
