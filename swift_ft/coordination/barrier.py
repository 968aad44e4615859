"""A barrier in the rendezvous store, for the workers that are about to form a process group.

A loss ends the wait at this barrier at once. Inside torch's rendezvous it would last until the timeout,
because the dead peer never publishes its address.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["Barrier"]


class Barrier:
    """One barrier, as one of its workers sees it.

    Args:
        rendezvous: the job's store.
        name: of the barrier. Several disjoint sets of workers can use the same name.
        rank: this worker.
        ranks: all workers that meet here, this worker among them.
    """

    def __init__(self, rendezvous: RendezvousStore, name: str, rank: int, ranks: Sequence[int]) -> None:
        self._rendezvous = rendezvous
        self._prefix = f"{name}/{min(ranks)}"
        self._rank = rank
        self._ranks = ranks

    def arrive(self) -> None:
        """Record that this worker is here."""
        self._rendezvous.set(self._key(self._rank), "")
        if self._rendezvous.add(f"{self._prefix}/here", 1) == len(self._ranks):
            self._rendezvous.set(f"{self._prefix}/all", "")

    def is_full(self) -> bool:
        """Whether all workers have arrived."""
        return self._rendezvous.check([f"{self._prefix}/all"])

    def missing(self) -> list[int]:
        """The workers that have not arrived, by rank."""
        return [rank for rank in self._ranks if not self._rendezvous.check([self._key(rank)])]

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/here/{rank}"
