"""Decides whether and when a change of the layout pays.

A loss leaves no choice. Nodes that are added do: training stands still while state moves, and machines of a
spot market may be gone before that has paid. How long they stay is not known, so the rule is that of renting
skis: wait until the time that was lost by waiting equals the cost of the change, then change. Whatever the
nodes do, that loses at most twice what is lost if their stay is known. Nodes that come and go cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the layout that is possible.

    Attributes:
        before_ns: time of an iteration without it.
        after_ns: time of an iteration with it.
        cost_ns: how long training stands still for it.
    """

    before_ns: int
    after_ns: int
    cost_ns: int

    @property
    def gain_ns(self) -> int:
        """Time that each iteration saves; not positive if it is not faster."""
        return self.before_ns - self.after_ns

    @property
    def pays_after(self) -> int | None:
        """Iterations after which it has paid; None if it never does."""
        return None if self.gain_ns <= 0 else -(-self.cost_ns // self.gain_ns)

    def is_due(self, waited: int) -> bool:
        """Whether as much was lost by waiting as it costs.

        Args:
            waited: iterations for which it has been possible.
        """
        return self.pays_after is not None and waited >= self.pays_after

    def pays_within(self, left: int) -> bool:
        """Whether it gains more than it costs before the end.

        Args:
            left: iterations to come.
        """
        return self.gain_ns * left > self.cost_ns
