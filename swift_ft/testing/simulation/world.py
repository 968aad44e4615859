"""The world of a simulated job: the journal, the store, process groups, and random numbers.

A participant knows its world and its own machine. The world does not know the participants' classes:
`cluster.py` and `job.py` fill in what depends on them.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Sequencer, Stamped
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.protocol import step, step_all
from swift_ft.recovery.snapshot import JournalSnapshot, snapshot_from_text, snapshot_to_text
from swift_ft.testing.simulation.heads import Heads
from swift_ft.testing.simulation.store import Content, Logged, SharedStore, Violation

_RATE = 0.02
_FOLLOWS = 25
"""Events that a newcomer follows."""


@dataclass(slots=True)
class Group:
    """A process group, formed once all ranks have joined. A rank that left or died is gone for good.

    Attributes:
        ready: in a joint replay, the content that each member begins with.
        joined: ranks that have joined.
        gone: ranks that have left, or died.
        broken: its connections failed.
        mail: messages by (source, destination, iteration), as (chain, history).
    """

    ready: dict[int, Content | None] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    broken: bool = False
    mail: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Offer:
    """The state that a worker offers to the next world.

    Attributes:
        content: a copy.
        served: it can be read.
    """

    content: Content
    served: bool = True


class Host(Protocol):
    """A machine, as its own processes and other machines see it."""

    name: str
    alive: bool
    frozen: bool

    @property
    def processes(self) -> Sequence[object]:
        """The workers that run on it, of whichever world."""


class World(ABC):
    """The things that the participants of one run share.

    Args:
        seed: decides everything.
        machines: slots.
        workers: per machine.
        sessionless: the script has no session.
        trace: called with each line of the run's journal, if given.

    Attributes:
        rng: the only source of random numbers.
        seen: how often each kind of thing happened.
        events: the journal.
        states: the protocol's state before each event, and after the last one.
        ends: how many events there were after each block: participants read whole blocks.
        heads: which events of workers and joins travel through, if the job has any (:meth:`use_heads`).
        ticks: steps of the simulation so far.
        settings: what the seed decided.
        claimed: worker 0 has claimed the store.
        shapes_known: the workers have trained, so the shapes of their messages are known.
        offers: states that are offered to the next world, by address.
        results: the final content of each worker that completed its script, by rank.
        max_replay_shards: among how many workers a replay can be spread; with more than 1, survivors help.
        setup: what all machines of the job have in common.
    """

    max_replay_shards = 1
    setup = ("script: the job's",)

    def __init__(
        self,
        seed: int,
        machines: int,
        workers: int,
        *,
        sessionless: bool = False,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.events: list[ev.Event] = []
        self.states = [State()]
        self.ends = [0]
        self.heads = Heads(seed, self.write, self.seen)
        self._sequencer = Sequencer()
        self._newcomers = Newcomers(seed, self.seen)
        self.ticks = 0
        self._size = machines * workers
        self.offers: dict[str, Offer] = {}
        self.settings = Settings.draw(seed, self.rng, sessionless=sessionless)
        self.store = self.make_store()
        self.store.logs_survive = self.settings.logs_survive
        self.claimed = False
        self.shapes_known = False
        self.results: dict[int, Content] = {}
        self._groups: dict[tuple[int, bool], Group] = {}
        self._trace = trace

    @property
    def world_size(self) -> int:
        """Number of workers of the present world."""
        return self.states[-1].world_size or self._size

    def domain_of(self, base: str) -> str:
        """The failure domain of a machine; empty if each is one of its own."""
        return ""

    def make_store(self) -> SharedStore:
        """The store of the job."""
        return SharedStore()

    def group(self, generation: int, *, replay: bool = False) -> Group:
        """The group of a generation, or the one in which its replay groups replay."""
        return self._groups.setdefault((generation, replay), Group())

    def use_heads(self) -> None:
        """Let events of workers and joins travel through heads, and newcomers begin from snapshots."""
        self.heads.use()
        self._newcomers.use()

    # ------------------------------------------------------------------------------------- the journal

    def append(self, event: ev.Event, by: str) -> int:
        """Write a block of one event to the journal; returns the position after it."""
        self._append(event, by)
        self.ends.append(len(self.events))
        return len(self.events)

    def write(self, block: Sequence[Stamped]) -> int:
        """Write a block to the journal. An event that is there already changes nothing."""
        self._sequencer, entries = self._sequencer.admit_all(block)
        self.seen["the same event twice"] += len(block) - len(entries)
        before = self.states[-1]
        for entry in entries:
            self._append(entry.event, entry.by)
        assert step_all(before, (entry.event for entry in entries)) == self.states[-1]
        if entries:
            self.ends.append(len(self.events))
        return len(self.events)

    def end_before(self, position: int) -> int:
        """The end of the last block that lies within so many events."""
        return self.ends[bisect_right(self.ends, position) - 1]

    def _append(self, event: ev.Event, by: str) -> None:
        before = self.states[-1]
        after = step(before, event)
        self._newcomers.check(before, event, after)
        self.events.append(event)
        self.states.append(after)
        if self._trace is not None:
            self._trace_event(event, by, before, after)
        if getattr(event, "generation", before.generation) < before.generation:
            self.seen[f"late {type(event).__name__} while {before.phase}"] += 1
        if after is not before:
            self.state_changed(before, after)
        else:
            self.seen[f"no news: {type(event).__name__}"] += 1

    def note(self, what: str) -> None:
        """Add a line to the trace that is not an event."""
        if self._trace is not None:
            self._trace(f"{self.ticks:5d} *** {what}")

    def _trace_event(self, event: ev.Event, by: str, before: State, after: State) -> None:
        assert self._trace is not None
        self._trace(f"{self.ticks:5d} {by:60s} {event}{'' if after is not before else '   (no news)'}")
        if after.phase != before.phase or after.generation != before.generation:
            plan = f" {after.plan}" if after.plan is not None and before.plan is None else ""
            self._trace(
                f"{'':6s}--> {after.phase} generation {after.generation} epoch {after.checkpoints.epoch} "
                f"members {after.members} committed {after.checkpoints.committed}{plan}"
            )

    # ------------------------------------------------------------------ what depends on the participants

    @abstractmethod
    def state_changed(self, before: State, after: State) -> None:
        """Called after each event that changed the state."""

    @abstractmethod
    def membership_changed(self) -> None:
        """Called after a machine or a worker started, ended or was renamed."""

    @abstractmethod
    def machine_named(self, name: str) -> Host:
        """The machine that has, or had, a name."""

    @abstractmethod
    def logged(self, sender: int, receiver: int, iteration: int, since_generation: int) -> Logged | str:
        """The messages that a replay can read of a sender's log, or the reason why it cannot."""

    @abstractmethod
    def check_formed(self, generation: int, plan: Plan) -> None:
        """Called when a group is formed, before any member takes a step.

        Raises:
            Violation: if its members' states do not belong together.
        """

    @abstractmethod
    def provoke_fault(self, chance: float, delays: Sequence[int]) -> None:
        """A fault may strike soon, after one of these numbers of ticks, if any is left."""

    @abstractmethod
    def freezes_before_write(self, machine: Host, event: ev.Event) -> bool:
        """Whether a machine freezes between a worker's decision to write an event and the write."""


class Newcomers:
    """One newcomer after the other reads a snapshot, and follows the journal for a while.

    Args:
        seen: how often each kind of thing happened.
    """

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self._rng = random.Random(f"newcomers {seed}")
        self._seen = seen
        self._rate = 0.0
        self._state: State | None = None
        self._left = 0

    def use(self) -> None:
        """Let newcomers come from now on."""
        self._rate = _RATE

    def check(self, before: State, event: ev.Event, after: State) -> None:
        """Compare a newcomer's state with that of all others.

        Raises:
            Violation: if a snapshot is not what it was made of, or leads to another state.
        """
        if self._state is None:
            if self._rng.random() >= self._rate:
                return
            made = JournalSnapshot(before, Sequencer(), 0)
            self._state, self._left = snapshot_from_text(snapshot_to_text(made)).state, _FOLLOWS
            if self._state != before:
                raise Violation(f"a snapshot is not what it was made of: {self._state} and {before}")
            self._seen[f"a newcomer while {before.phase}"] += 1
        self._state, self._left = step(self._state, event), self._left - 1
        if self._state != after:
            raise Violation(f"a newcomer's state differs after {event}: {self._state} and {after}")
        if not self._left:
            self._state = None


@dataclass(slots=True)
class Settings:
    """The settings of one run.

    Attributes:
        iterations: to train.
        checkpoint_every: iterations from one regular checkpoint to the next.
        keep: committed checkpoints that are kept.
        background_rate: how often a worker's background threads act instead of its training thread.
        request_rate: how often a worker requests an early checkpoint, per iteration.
        news_rate: how often a participant reads the journal before it acts.
        resume: the checkpoints of an earlier run that this job resumes from, if any, oldest first.
        logs_survive: logs survive their machine.
        on_device: memory is too scarce to retain the messages that stay inside a machine.
        sessionless: the script has no session.
    """

    iterations: int
    checkpoint_every: int
    keep: int
    background_rate: float
    request_rate: float
    news_rate: float
    resume: tuple[int, ...]
    logs_survive: bool
    on_device: bool
    sessionless: bool

    @classmethod
    def draw(cls, seed: int, rng: random.Random, *, sessionless: bool) -> Settings:
        """Draw the settings of a seed."""
        settings = cls(
            iterations=rng.randint(3, 9),
            checkpoint_every=rng.choice((1, 1, 2, 3, 4, 9)),
            keep=rng.randint(1, 2),
            background_rate=rng.choice((0.4, 0.4, 0.04)),
            request_rate=rng.choice((0.0, 0.0, 0.1, 0.5)),
            news_rate=rng.choice((1.0, 1.0, 0.1)),
            resume=(),
            logs_survive=seed % 5 == 1,
            on_device=seed % 5 == 2,
            sessionless=sessionless,
        )
        if rng.random() < 0.2 and not sessionless:
            every = settings.checkpoint_every
            settings.resume = (every, 2 * every)[: rng.randint(1, 2)]
            settings.iterations = max(settings.iterations, settings.resume[-1] + 2)
        return settings
