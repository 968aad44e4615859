"""The watch over workers that all others wait for: where their scripts are, if a deadline passes.

A worker says itself where it stands in an iteration that takes too long (`runtime/slowness/`). Before its
session and in a recovery nothing in it looks, so its agent asks it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from swift_ft.config import detection_timings as timings
from swift_ft.config.run_config import RunConfig
from swift_ft.coordination.progress import STANDS, Stand
from swift_ft.launch.detection.worker_channels import WorkerChannels
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.waits import Limit, limit_of_answers

_BEGINS = "starting"
"""The mode of a worker that has shown nothing yet."""


class LateWorkers:
    """Shows where the late workers of one machine are, with their progress.

    Owner: the agent's main thread.

    Args:
        membership: this machine's, with the state of the job.
        heard: what the workers say, and what is shown of them.
        config: the job's.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        membership: JournalRendezvous,
        heard: WorkerChannels,
        config: RunConfig,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._heard = heard
        self._config = config
        self._now = now
        self._seen: tuple[int, Phase, Limit | None] | None = None
        self._look_at = math.inf

    @property
    def pause_s(self) -> float:
        """The time until :meth:`look` has something to do. Infinite while nobody can be late."""
        return self._look_at - self._now()

    def look(self, ranks: Mapping[int, int]) -> None:
        """Ask those that the present phase waits for, if it is time.

        Args:
            ranks: the workers' ranks in the job, by local rank.
        """
        state, now = self._membership.follower.state, self._now()
        limit = limit_of_answers(state)
        limit_s = math.inf if limit is None else getattr(self._config, limit)
        between_s: float = limit_s / timings.LATE_LOOKS
        if (wait := (state.generation, state.phase, limit)) != self._seen:
            self._seen, self._look_at = wait, now + between_s
        if now < self._look_at:
            return
        self._look_at = now + between_s
        slot = state.slot_of(self._membership.machine)
        late = {rank for rank in state.missing_ranks() if state.slot_of_rank(rank) == slot}
        for local_rank, rank in sorted(ranks.items()):
            if rank in late:
                self._show(local_rank, rank)

    def _show(self, local_rank: int, rank: int) -> None:
        """Show where a worker is, or that it has not said so: else the note of a dead one may be there."""
        heard, iteration = self._heard, self._heard.iteration(local_rank) or 0
        # One that cannot be heard may have become another program, which the signal would end.
        stack = heard.stacks.get(local_rank) if heard.hears(local_rank) else None
        places = stack.ask(timings.STACK_S) if stack is not None else []
        before = heard.shown.get(rank, {"iteration": iteration, "mode": _BEGINS, "at": time.time()})
        facts = {name: fact for name, fact in before.items() if name != STANDS}
        if places:
            told = before.get(STANDS, {})  # by itself, and with more of its stack
            same = told.get("place") == places[0]
            facts[STANDS] = told if same else asdict(Stand(iteration, places[0], waits=False, stack=()))
        heard.shown[rank] = facts
