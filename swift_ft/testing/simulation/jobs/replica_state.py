"""The state of a simulated data-parallel replica.

A parameter's value lists the averages that it contains, so that a lost, repeated or foreign update shows. An
average is named by its iteration and by the state that it was computed from: all replicas must contribute
the same name. The traces of an inexact undo are part of the value: replicas that undo the same are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from swift_ft.testing.simulation.store import Violation

BUCKETS = ((3,), (1, 2), (0,))
"""Parameters by bucket, in the order in which backward fills the buckets."""

PARAMETERS = 4

LOSS_BUCKET = len(BUCKETS)
"""Number of an all-reduce after the optimizer's step (of a loss that is printed, for example)."""


class Optimizer(Enum):
    """When parameters are updated, and whether an update can be undone."""

    WAIT_FREE = "each bucket as soon as its average is there; can undo"
    WRAPPED = "all at the end; can undo"
    PLAIN = "all at the end; cannot undo"


@dataclass(frozen=True, slots=True)
class ParameterValue:
    """One parameter.

    Attributes:
        applied: the averages that it contains, in order, as (iteration, name).
        traces: its initial value, and the traces of undos.
    """

    applied: tuple[tuple[int, int], ...] = ()
    traces: tuple[Hashable, ...] = ()

    def updated(self, average: tuple[int, int]) -> ParameterValue:
        """The value after an update."""
        return replace(self, applied=(*self.applied, average))

    def undone(self, average: tuple[int, int], exact: bool) -> ParameterValue:
        """The value after the undo of its last update.

        Raises:
            Violation: if that was not ``average``.
        """
        if self.applied[-1:] != (average,):
            raise Violation(f"{average} is undone in {self}")
        return ParameterValue(self.applied[:-1], self.traces if exact else (*self.traces, average))


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica's state.

    Attributes:
        iteration: completed iterations.
        values: by parameter.
        statistics: iterations in the running statistics, which each replica has of its own.
    """

    iteration: int
    values: tuple[ParameterValue, ...]
    statistics: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def after(cls, iterations: int) -> ReplicaState:
        """The state of an earlier run after some iterations."""
        value = ParameterValue(tuple((i, -1) for i in range(iterations)))
        return cls(iterations, (value,) * PARAMETERS, (*range(iterations),))

    def with_values(self, values: Sequence[ParameterValue]) -> ReplicaState:
        """The same state with other values."""
        return replace(self, values=tuple(values))
