"""What a few iterations tell the planner: computation per machine, bytes per boundary (paper §5.3)."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from torch._C._distributed_c10d import Store as Rendezvous

from swift_ft.config import WorkerContext
from swift_ft.errors import UsageError
from swift_ft.logging import Account
from swift_ft.profile import Profile, write_profile

__all__ = ["Profiler"]

_WARM_UP = 2  # iterations: caches, lazy initialisation
_MEASURED = 5


class Profiler:
    """Measures this worker's first iterations, and reads what all have measured.

    A worker computes while it does not wait for a message. A machine takes as long as its slowest worker.

    Args:
        context: the worker's place.
        rendezvous: where everybody publishes.
    """

    def __init__(self, context: WorkerContext, rendezvous: Rendezvous) -> None:
        self._context = context
        self._rendezvous = rendezvous
        self._seen = 0
        self._compute_s: list[float] = []
        self._out = Path(context.profile_out) if context.profile_out and context.rank == 0 else None

    def add(self, account: Account, sent: Mapping[int, int]) -> None:
        """A live iteration is over.

        Args:
            account: of its log.
            sent: payload bytes to each other machine.
        """
        self._seen += 1
        if _WARM_UP < self._seen <= _WARM_UP + _MEASURED:
            self._compute_s.append(max(0.0, account.step_s - account.bubble_s))
        if self._seen == _WARM_UP + _MEASURED:
            facts = {"compute_s": median(self._compute_s), "sent": dict(sent)}
            self._rendezvous.set(_key(self._context.rank), json.dumps(facts))
        if self._out is not None and self._seen >= _WARM_UP + _MEASURED and self._complete():
            try:
                write_profile(self.read(), self._out)
            except (UsageError, OSError) as error:
                warnings.warn(
                    f"No profile is written to {self._out}: {error} Training goes on.", stacklevel=3
                )
            self._out = None

    def read(self) -> Profile:
        """The job's profile.

        Raises:
            UsageError: not everybody has measured enough, or machines that are no neighbours send messages to
                each other: the planner knows chains only.
        """
        if not self._complete():
            raise UsageError(
                f"There is no profile yet: it takes {_WARM_UP + _MEASURED} iterations of a pipeline on every "
                "worker."
            )
        context = self._context
        machines = context.world // context.workers
        compute_s, between = [0.0] * machines, Counter[tuple[int, int]]()
        for rank in range(context.world):
            facts = json.loads(self._rendezvous.get(_key(rank)))
            slot = rank // context.workers
            compute_s[slot] = max(compute_s[slot], facts["compute_s"])
            for other, size in facts["sent"].items():
                between[min(slot, int(other)), max(slot, int(other))] += size
        far = [pair for pair in between if pair[1] != pair[0] + 1]
        if far:
            raise UsageError(
                f"Machines {far[0][0]} and {far[0][1]} send messages to each other, and are no neighbours: "
                "the planner knows chains only, such as 1F1B and GPipe make."
            )
        return Profile(tuple(compute_s), tuple(between[slot, slot + 1] for slot in range(machines - 1)))

    def _complete(self) -> bool:
        return bool(self._rendezvous.check([_key(rank) for rank in range(self._context.world)]))


def _key(rank: int) -> str:
    return f"profile/{rank}"
