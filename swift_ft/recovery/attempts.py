"""Ways back to training, and how often each was tried for the same loss. Pure.

A way that failed twice for the same reason fails a third time, too. So each is tried at most twice for one
part at the same iteration. Then comes the next one:

    in place (continue, replicas, replay) ──▶ memory ──▶ checkpoint (fallback, restart) ──▶ the job ends
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from immutables import Map

from swift_ft.recovery.causes import ADVICE, Cause
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.recovery.values import replace

MAX_TRIES = 2
"""The number of times that a way back is tried for the same loss."""

MAX_WAITS = 7
"""So often in a row a machine comes again after a cause that passes: five minutes with all pauses."""

COMMUNICATION, DEADLINE, STATE = "communication", "waiting for answers", "the state to load or replay"
"""Parts that can fail and that are not machines."""


def machine_in(slot: int) -> str:
    """The part that a slot's machine is, whichever machine fills it."""
    return f"machine {slot}"


class Way(StrEnum):
    """A way back to training."""

    IN_PLACE = "the recovery in place"
    """Survivors keep their state."""
    MEMORY = "the return to a state in memory"
    """All workers begin from a recent state in the memory of the living."""
    CHECKPOINT = "the return to the checkpoint"
    """All workers begin from the global checkpoint, or from the beginning if there is none."""

    @classmethod
    def of(cls, plan: Plan) -> Way:
        """The way that a plan takes."""
        in_place = (
            RecoveryMode.CONTINUE,
            RecoveryMode.LAYOUT,
            RecoveryMode.REPLICA,
            RecoveryMode.REPLAY,
        )
        if plan.mode == RecoveryMode.MEMORY:
            return cls.MEMORY
        return cls.IN_PLACE if plan.mode in in_place else cls.CHECKPOINT


@dataclass(frozen=True, slots=True)
class Attempts:
    """The ways that were tried, and the parts that have failed since.

    Attributes:
        tried: how often a way was tried, by way, iteration of the loss, and lost part. A commit empties it.
        tried_for: parts for whose failure the last way was chosen.
        failed: parts that have failed since the last plan; True for those that had something to do in it.
        reason: how the last one failed.
        lost_at: the consensus iteration at which the present loss interrupted training; None before the first
            plan. It stays the same until an iteration was trained since.
        live_at: the iteration at which training has continued after the last plan; None if it has not.
        way: that of the last plan.
        starving: by part, how often it ran out of memory since the last plan.
        starved: the same before the last plan, since an iteration was trained that had never been before.
        furthest: the latest consensus iteration at which a loss has interrupted training.
        unheard: by slot, newcomers in a row that were lost before they reported.
        crashed: by part, how often an error in native code has ended it while no worker had a session.
        waits: by machine's identity, how often in a row a newcomer there, or a guest, has failed by a cause
            that passes; as often as on any other at least. Going live empties it.
    """

    tried: Map[tuple[Way, int, str], int] = field(default_factory=Map)
    tried_for: frozenset[str] = frozenset()
    failed: Map[str, bool] = field(default_factory=Map)
    reason: str = ""
    lost_at: int | None = None
    live_at: int | None = None
    way: Way | None = None
    starving: Map[str, int] = field(default_factory=Map)
    starved: Map[str, int] = field(default_factory=Map)
    furthest: int = 0
    unheard: Map[int, int] = field(default_factory=Map)
    crashed: Map[str, int] = field(default_factory=Map)
    waits: Map[str, int] = field(default_factory=Map)

    def fail(self, part: str, reason: str, *, had_task: bool) -> Attempts:
        """Note that a part has failed."""
        # One failure in a task is enough, whatever the part has failed in since.
        had_task = had_task or self.failed.get(part, False)
        return replace(self, failed=self.failed.set(part, had_task), reason=reason)

    def starve(self, part: str) -> Attempts:
        """Note that a part has failed for want of memory."""
        return replace(self, starving=_sum(self.starving, Map({part: 1})))

    def crash(self, part: str) -> Attempts:
        """Note that a part has failed by an error in native code before any worker had a session."""
        return replace(self, crashed=_sum(self.crashed, Map({part: 1})))

    def has_run(self) -> Attempts:
        """Note that a script without a session has run for long: what ended earlier starts is over."""
        return replace(self, starving=Map(), starved=Map(), crashed=Map())

    def hopeless(self, *, has_sessions: bool) -> str:
        """Why no way back helps: a part fails alike in each start. Empty if none has shown that.

        Args:
            has_sessions: progress is known.
        """
        # Whatever the way: a replacement needs as much memory for the same iteration.
        since = "without progress" if has_sessions else "soon after its start"
        for part, times in sorted([*self.starved.items(), *self.starving.items()]):
            if times >= MAX_TRIES:
                return (
                    f"{part} ran out of memory {times} times {since} ({self.reason}): "
                    "let the script use less, or give its machine more"
                )
        for part, times in sorted(self.crashed.items()):
            if times >= MAX_TRIES:
                return (
                    f"{part} ended {times} times by an error in native code, and no worker had a session yet "
                    f"({self.reason}): {ADVICE[Cause.NATIVE]}"
                )
        return ""

    def put_off(self, machine: str) -> Attempts:
        """Note that a newcomer has failed by a cause that passes.

        Args:
            machine: its machine's identity.
        """
        # Whoever comes next meets the same server, and stays away for as long. But that is no further time:
        # spares fail one after the other within seconds.
        times = max(self.waits.get(machine, 0) + 1, self._waited)
        return replace(self, waits=self.waits.set(machine, times))

    @property
    def may_wait(self) -> bool:
        """Whether a cause that passes may still be waited for, and the survivors keep their state."""
        return self._waited < MAX_WAITS

    def waits_of(self, machine: str) -> int:
        """The number of a machine's wait, by which it becomes longer. 0 once that is given up."""
        return self.waits.get(machine, 0) if self.may_wait else 0

    @property
    def _waited(self) -> int:
        return max(self.waits.values(), default=0)

    def miss(self, slot: int) -> Attempts:
        """Note that a newcomer was lost before it reported."""
        return replace(self, unheard=self.unheard.set(slot, self.unheard.get(slot, 0) + 1))

    def resume(self, iteration: int) -> Attempts:
        """Note that training continues at an iteration."""
        return replace(self, live_at=iteration, waits=Map())

    def begin(self, statuses: Mapping[int, StatusReported], committed: int | None) -> Attempts:
        """All workers have reported. It is a new loss if an iteration was trained since the last plan."""
        reached = [s.iteration for s in statuses.values() if s.live and s.iteration is not None]
        consensus = min(reached, default=committed or 0)
        # All have reported, so the row of newcomers that were lost before that has ended.
        attempts = replace(
            self,
            unheard=Map(),
            crashed=Map(),
            starved=_sum(self.starved, self.starving),
            starving=Map(),
            furthest=max(self.furthest, consensus),
        )
        # Going live is no progress without an iteration: the same loss would be tried for ever.
        if self.lost_at is None or (self.live_at is not None and consensus > self.live_at):
            # For memory, iterations repeated after a return are no progress: its end may come sooner.
            starved = self.starving if consensus > self.furthest else attempts.starved
            return replace(attempts, lost_at=consensus, starved=starved)
        return replace(attempts, tried=self.tried.update(dict(self._tried_with_a_task())))

    def _tried_with_a_task(self) -> Iterator[tuple[tuple[Way, int, str], int]]:
        """A part that failed in its task has tried the last way, too, if others began it."""
        for part, had_task in self.failed.items():
            # Parts in `tried_for` were counted when the way was chosen.
            if had_task and self.way is not None and part not in self.tried_for:
                yield self._key(self.way, part), self._tries(self.way, part) + 1

    def exhausted(self, way: Way) -> str:
        """Why a way must not be tried again. Empty if it may be."""
        for part in sorted(self.failed):
            if self._tries(way, part) >= MAX_TRIES:
                return f"{part} failed twice in {way} at iteration {self.lost_at}: {self.reason}"
        return ""

    def count(self, way: Way) -> Attempts:
        """Note that a way is tried now, for all parts that have failed since the last plan."""
        tries = {self._key(way, part): self._tries(way, part) + 1 for part in self.failed}
        return replace(
            self,
            tried=self.tried.update(tries),
            tried_for=frozenset(self.failed),
            failed=Map(),
            live_at=None,
            way=way,
        )

    def _tries(self, way: Way, part: str) -> int:
        return self.tried.get(self._key(way, part), 0)

    def _key(self, way: Way, part: str) -> tuple[Way, int, str]:
        assert self.lost_at is not None
        return way, self.lost_at, part


def _sum(one: Map[str, int], other: Map[str, int]) -> Map[str, int]:
    return one.update({part: one.get(part, 0) + times for part, times in other.items()})
