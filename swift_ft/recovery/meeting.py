"""Those who are about to form a group find each other in the rendezvous store first.

A loss ends this wait at once, and one in torch's forming, for an address that was never told, only in time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import Store

__all__ = ["Meeting"]


class Meeting:
    """One meeting, as one of those who come sees it.

    Args:
        rendezvous: the job's store.
        place: where it is held. Portions of one place are told apart by their lowest rank.
        rank: this worker.
        ranks: who should come, this worker among them.
    """

    def __init__(self, rendezvous: Store, place: str, rank: int, ranks: Sequence[int]) -> None:
        self._rendezvous = rendezvous
        self._prefix = f"{place}/{min(ranks)}"
        self._rank = rank
        self._ranks = ranks

    def come(self) -> None:
        """Tell that this worker is here."""
        self._rendezvous.set(self._key(self._rank), "")
        if self._rendezvous.add(f"{self._prefix}/here", 1) == len(self._ranks):
            self._rendezvous.set(f"{self._prefix}/all", "")

    def complete(self) -> bool:
        """Whether all are here."""
        return self._rendezvous.check([f"{self._prefix}/all"])

    def absent(self) -> list[int]:
        """Who did not come, by rank."""
        return [rank for rank in self._ranks if not self._rendezvous.check([self._key(rank)])]

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/here/{rank}"
