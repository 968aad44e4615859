"""The state of a job, which every participant has and the protocol steps from event to event. Pure.

The state is one frozen value that falls into parts. What grows with the job is kept in persistent maps: a
change costs the logarithm of the job's size and leaves the value before it as it was, so that both can be
compared. Iterate over such a map in sorted order wherever the order matters: all participants must agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from immutables import Map  # a change costs what it changes, not the size of the job (decision 4)

from swift_ft.recovery.attempts import Attempts
from swift_ft.recovery.audits import Audits
from swift_ft.recovery.events import StatusReported, StepDiffered
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.recovery.maps import Numbers
from swift_ft.recovery.membership import Membership, base_of
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.worlds import Worlds

MAX_PATIENCE = 8
"""The largest factor for the deadline of heartbeats: a worker that hangs must still be found."""


class Phase(StrEnum):
    """The phase of the job."""

    FORMING = "forming"
    """A slot is empty: the job waits for a machine."""
    AGREEING = "agreeing"
    """Every worker reports its status."""
    RECOVERING = "recovering"
    """The plan is carried out."""
    LIVE = "live"
    """All workers train."""
    ENDED = "ended"
    """Final."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict: how the job ended."""

    ok: bool
    reason: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class JobShape:
    """The shape of the job, which the first event of the journal fixes; another world has its own machines.

    Attributes:
        machines: number of slots.
        workers_per_machine: the same on every machine.
        max_failures: machines lost since the last committed checkpoint after which the job stops; None for no
            limit.
        setup: what all machines must have in common, as ``name: value``.
        min_machines: as few may run all slots; None for any number, but only after a loss.
        shrinks: if no machine comes for a lost one, a smaller world is tried before guests.
        max_machine_failures: a machine that was lost so often by its own fault is left out; None if none is.
    """

    machines: int = 0
    workers_per_machine: int = 1
    max_failures: int | None = None
    setup: tuple[str, ...] = ()
    min_machines: int | None = None
    shrinks: bool = False
    max_machine_failures: int | None = None


@dataclass(frozen=True, slots=True)
class RecoveryRound:
    """The agreement of the workers so far. It starts again with each generation, except for the reports.

    A report says how a worker stands that has left its groups. That stays true until a plan is carried out,
    so a machine that is lost before then costs its own workers' reports only: the next generation goes on
    with those of all others.

    Attributes:
        asked_in: the generation that began to ask for the reports.
        statuses: the report of each rank; complete when AGREEING ends.
        decided: a plan was made of the reports. The next generation asks for others.
        sessionless: slots whose workers run a script without a session.
        plan: set exactly in RECOVERING and LIVE.
        ready: ranks that have done their part of the plan; all of them in LIVE.
        awaiting: ranks that are about to form the group of their replay, or have formed it.
        finished: ranks that have completed their last iteration.
        stopped: ranks that wait for a change of the layout.
        after_silence: a machine that fell silent was replaced at once: more of its rack may follow.
    """

    asked_in: int = 0
    statuses: Map[int, StatusReported] = field(default_factory=Map)
    decided: bool = False
    sessionless: Numbers = field(default_factory=Map)
    plan: Plan | None = None
    ready: Numbers = field(default_factory=Map)
    awaiting: Numbers = field(default_factory=Map)
    finished: Numbers = field(default_factory=Map)
    stopped: Numbers = field(default_factory=Map)
    after_silence: bool = False


@dataclass(frozen=True, slots=True)
class PendingLayout:
    """A change that was asked for, and the completed iterations at which all workers stop for it.

    Attributes:
        iteration: at which they stop.
        layers: of each stage; empty if no layers move.
        shares: samples of each replica in a global batch; empty if these stay.
        world: the number of the world that takes over; 0 if none does.
    """

    iteration: int
    layers: StageLayers = ()
    shares: tuple[int, ...] = ()
    world: int = 0


class Shares(NamedTuple):
    """Shares of global batches from an iteration on: samples of each replica."""

    since: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layers of a LayerStack on each stage, and the share of a global batch of each replica.

    Attributes:
        current: the number of layers of each stage; empty for the layout with which the script began.
        pending: what was asked for. A loss ends it: in the next generation it is asked for again, or not.
        declined: layouts that a worker could not take.
        since: iterations that were completed when the present layout began; 0 for the first.
        changes: how often it has changed.
        present: as ``current``, also for the first layout. Known from the first plan on, as ``placed`` is.
        placed: the layers of each worker, by rank.
        pipelines: of a LayerStack, that are replicas of each other: the ranks of each. Empty if there is one.
        shares: each change of how batches are dealt, the earliest first. An iteration that is repeated is
            dealt as it was.
    """

    current: StageLayers = ()
    pending: PendingLayout | None = None
    declined: frozenset[StageLayers] = frozenset()
    since: int = 0
    changes: int = 0
    present: StageLayers = ()
    placed: Map[int, tuple[int, ...]] = field(default_factory=Map)
    pipelines: tuple[tuple[int, ...], ...] = ()
    shares: tuple[Shares, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A worker's part of a checkpoint that is durable: its place, and the digest of the list of its files."""

    path: str
    digest: str = ""


class Doubt(NamedTuple):
    """All workers have gone back to a checkpoint, since what was computed after it may be wrong.

    Attributes:
        after: the iteration of that checkpoint.
        generation: the last one in which it was computed so. What is saved in later ones is not in doubt.
    """

    after: int
    generation: int


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints and logs that count."""

    committed: int | None = None
    """Iteration of the last committed checkpoint. Decreases only if that one is given up."""
    earlier: tuple[int, ...] = ()
    """Older committed checkpoints, oldest first, to which all workers can return if newer ones are damaged.

    All of them are before ``committed``, and in the store: they are not deleted.
    """
    owed: int | None = None
    """The last iteration of the training, if a checkpoint follows it: without that one the job has failed."""
    requested: int | None = None
    """An early checkpoint that was asked for: of this generation, and after ``committed``."""
    parts: Map[int, Map[int, SavedPart]] = field(default_factory=Map)
    """Each rank's persisted part, by iteration. All iterations are after ``committed``."""
    revoked: Map[tuple[int, int], int] = field(default_factory=Map)
    """By iteration and rank: a part counts only if it was saved in this generation, or later.

    The worker has taken the iteration back, or saves it again. All these iterations are after ``committed``.
    """
    log_gap_before: Map[int, int] = field(default_factory=Map)
    """By rank: the worker's log has gaps before this iteration, since a replica gave it its state.

    All these iterations are after ``committed``.
    """
    epoch: int = 0
    """Counts the returns of all workers to a checkpoint: parts of two epochs never make one checkpoint."""
    doubts: tuple[Doubt, ...] = ()
    """The returns after which markers must go from the store: a resumed run would believe them."""
    log_since: int = 0
    """Log segments of generations before this one belong to an abandoned history."""

    def covers(self, iteration: int) -> bool:
        """Whether the checkpoint of an iteration, or a newer one, is committed."""
        return self.committed is not None and iteration <= self.committed

    @property
    def kept(self) -> tuple[int, ...]:
        """All committed checkpoints that count, oldest first."""
        return self.earlier if self.committed is None else (*self.earlier, self.committed)


@dataclass(frozen=True, slots=True)
class Tries:
    """Counts of what must not go on for ever, and facts that the current recovery must not forget.

    Attributes:
        restarts_left: how often a failing script may still be started again.
        restarts: how often all processes were started again, for whatever reason.
        failures: machines lost since the last committed checkpoint.
        attempts: ways back that were tried for the same loss.
        came_back: workers that answered just after they were declared silent.
        thawed: machines that joined again after they were lost because they said nothing.
        fallback_reason: why the logs cannot be used, until a fallback is done: in the middle of it, states
            are of two histories.
        memory_in_doubt: what memory checkpoints hold may be wrong, too, until that fallback is done.
        no_helpers_reason: why no worker helps in replays, until all are live.
        strangers: machines refused since the last committed checkpoint because what they computed differed.
        replay_targets: by rank, the iteration up to which the last plan replays, until all are live.
        stopped: how the job ends if scripts end because of a signal that a launcher got, until all are live.
        live_in: the last generation in which all were live; 0 for none. Later workers have never trained.
        script_error: the last error of a script that was started again for it: after how many iterations it
            came, and what would show that it is the same one (`repeats.py`); None if there was none.
    """

    restarts_left: int = 0
    restarts: int = 0
    failures: int = 0
    attempts: Attempts = field(default_factory=Attempts)
    came_back: int = 0
    thawed: int = 0
    fallback_reason: str | None = None
    memory_in_doubt: bool = False
    no_helpers_reason: str | None = None
    strangers: int = 0
    replay_targets: Map[int, int] = field(default_factory=Map)
    stopped: Verdict | None = None
    live_in: int = 0
    script_error: tuple[int | None, str] | None = None


@dataclass(frozen=True, slots=True)
class State:
    """All that a participant knows. Never changed in place.

    Attributes:
        phase: the phase of the job.
        generation: number of the current membership; grows by one each time AGREEING begins.
        shape: what changes with the world only.
        membership: which machine fills which slot.
        round: what this generation has agreed on.
        checkpoints: which checkpoints and logs count.
        tries: counters and reasons that outlive a generation.
        layouts: which layers are on which stage, and how batches are dealt.
        worlds: the set of workers that trains, and the one that is to take over.
        has_sessions: some worker has reported: the script, which is the same for all, has a session.
        injected: faults of a test that have happened.
        differed: steps that came out unlike when they were computed again, the newest last.
        audits: what spares have computed again.
        verdict: set exactly in ENDED.
    """

    phase: Phase = Phase.FORMING
    generation: int = 0
    shape: JobShape = field(default_factory=JobShape)
    membership: Membership = field(default_factory=Membership)
    round: RecoveryRound = field(default_factory=RecoveryRound)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    tries: Tries = field(default_factory=Tries)
    layouts: Layouts = field(default_factory=Layouts)
    worlds: Worlds = field(default_factory=Worlds)
    has_sessions: bool = False
    injected: frozenset[str] = frozenset()
    differed: tuple[StepDiffered, ...] = ()
    audits: Audits = field(default_factory=Audits)
    verdict: Verdict | None = None

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.shape.machines * self.shape.workers_per_machine

    @property
    def all_finished(self) -> bool:
        """Whether all workers have completed the last iteration: training is complete."""
        return len(self.round.finished) == self.world_size > 0

    @property
    def patience(self) -> int:
        """By how much the deadline for heartbeats of workers has grown."""
        return _patience(self.tries.came_back)

    @property
    def machine_patience(self) -> int:
        """By how much the time has grown for which a machine may be silent."""
        return _patience(self.tries.thawed)

    @property
    def plan(self) -> Plan | None:
        """The plan of this generation; None outside of RECOVERING and LIVE."""
        return self.round.plan

    @property
    def members(self) -> tuple[str | None, ...]:
        """The machine of each slot, None where it is empty. Costs the size of the job."""
        return tuple(self.membership.members.get(slot) for slot in range(self.shape.machines))

    @property
    def domains(self) -> tuple[str, ...]:
        """The failure domain of each slot's machine, empty without a name. Costs the size of the job.

        A guest shares its host's, which has a name then.
        """
        membership = self.membership
        named = [membership.domains.get(slot, "") for slot in range(self.shape.machines)]
        for guest, host in membership.hosts.items():
            if guest in membership.slots and host in membership.slots:
                shared = named[membership.slots[host]] or base_of(host)
                named[membership.slots[host]] = named[membership.slots[guest]] = shared
        return tuple(named)

    def slot_of(self, machine: str) -> int | None:
        """The slot that a machine fills, or None."""
        return self.membership.slots.get(machine)

    def slot_of_rank(self, rank: int) -> int:
        """The slot whose machine runs a worker."""
        return rank // self.shape.workers_per_machine

    def ranks_of(self, slot: int) -> range:
        """The ranks of the workers on a slot's machine."""
        workers = self.shape.workers_per_machine
        return range(slot * workers, (slot + 1) * workers)

    def missing(self) -> tuple[str, ...]:
        """Machines whose answer the current phase waits for, by slot. Costs the size of the job."""
        slots = sorted({self.slot_of_rank(rank) for rank in self.missing_ranks()})
        members = self.membership.members
        return tuple(members[slot] for slot in slots if slot in members)

    def missing_ranks(self) -> list[int]:
        """Workers whose answer the current phase waits for. Costs the size of the job."""
        match self.phase:
            case Phase.AGREEING:
                late = self._ranks_outside(self.round.statuses)
                return sorted(r for r in late if self.slot_of_rank(r) not in self.round.sessionless)
            case Phase.RECOVERING:
                return sorted(self.not_ready(range(self.world_size)))
        return []

    def _ranks_outside(self, ranks: Map[int, object]) -> set[int]:
        return {rank for rank in range(self.world_size) if rank not in ranks}

    def not_ready(self, ranks: Iterable[int]) -> set[int]:
        """Those of some workers that have not said that they are ready.

        Without helpers, unless only they are left: they are done when they learn that the others are.
        """
        late = {rank for rank in ranks if rank not in self.round.ready}
        replays = self.plan.parallel_replays if self.plan is not None else ()
        return late - {rank for replay in replays for rank in replay.helpers} or late


def _patience(false_alarms: int) -> int:
    """A deadline doubles from the second false alarm on, up to a bound."""
    return min(1 << min(max(0, false_alarms - 1), MAX_PATIENCE), MAX_PATIENCE)
