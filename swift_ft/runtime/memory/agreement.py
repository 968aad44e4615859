"""Agreement on complete copies: all workers have one of that iteration, in two memories each.

A copy is dropped only when a newer one is complete, or when it never can be. So the verdict is final: the
first worker to know it writes it.
"""

from __future__ import annotations

from swift_ft.config import store_keys
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

COMPLETE, SKIPPED = "complete", "skipped"


class Agreement:
    """A worker's part in the verdicts of one job.

    Args:
        rendezvous: where they are.
        world_size: workers.
    """

    def __init__(self, rendezvous: RendezvousStore, world_size: int) -> None:
        self._rendezvous = rendezvous
        self._world_size = world_size
        self._addresses: dict[int, str] = {}  # as they were read last; owner: the thread that sends

    def held(self, generation: int, iteration: int) -> None:
        """The worker's copy is held. The last worker says that it is complete."""
        if self._rendezvous.add(store_keys.memory_held(generation, iteration), 1) == self._world_size:
            self._decide(generation, iteration, COMPLETE)

    def skip(self, generation: int, iteration: int) -> None:
        """The worker has no copy of an iteration and never will, unless that one is complete already."""
        self._decide(generation, iteration, SKIPPED)

    def verdict(self, generation: int, iteration: int) -> str:
        """The verdict; empty as long as there is none."""
        key = store_keys.memory_verdict(generation, iteration)
        return self._rendezvous.get(key).decode() if self._rendezvous.check([key]) else ""

    def forget(self, generation: int, iteration: int) -> None:
        """Drop a verdict that is not needed any more."""
        for key_of in (store_keys.memory_verdict, store_keys.memory_held):
            self._rendezvous.delete_key(key_of(generation, iteration))

    def offer(self, rank: int, address: str) -> None:
        """A worker takes copies at an address."""
        self._rendezvous.set(store_keys.memory_address(rank), address)

    def address(self, rank: int) -> str | None:
        """The address at which a worker takes copies; None if it does not say. The store is asked once."""
        if rank not in self._addresses:
            key = store_keys.memory_address(rank)
            if not self._rendezvous.check([key]):
                return None
            self._addresses[rank] = self._rendezvous.get(key).decode()
        return self._addresses[rank]

    def ask_again(self, rank: int) -> None:
        """A worker takes no copy where it did: it may have been replaced."""
        self._addresses.pop(rank, None)

    def _decide(self, generation: int, iteration: int, verdict: str) -> None:
        self._rendezvous.compare_set(store_keys.memory_verdict(generation, iteration), "", verdict)
