"""The plan that a run would make if machines were lost now, from its own protocol and its archived state.

Nothing is predicted by other means. The losses, the machines that fill the slots, and the reports that the
workers would give are events, and :func:`swift_ft.recovery.protocol.step` answers them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

from swift_ft.costs.job import Worker
from swift_ft.errors import UsageError
from swift_ft.offline.archive import ArchivedJournal
from swift_ft.offline.estimate import Estimate, RunCosts
from swift_ft.recovery import events as ev
from swift_ft.recovery.guests import guests_wanted
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.memory import CopyPlacement, newest_in_memory
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.recovery.protocol import step


class Outcome(StrEnum):
    """The fate of the run."""

    RECOVERS = "recovers"
    """Training goes on."""
    WAITS = "waits"
    """It stands still until machines join, and ends if they do not."""
    RESTARTS = "restarts"
    """All processes start again from the beginning: there is no state to go on from."""
    ENDS = "ends"
    """It is over."""


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The work of one worker in a recovery.

    Attributes:
        rank: the worker.
        machine: its slot.
        lost: its machine is lost, and another one takes its place.
        loads: iteration of the state that it loads; None if it keeps its own, or receives one.
        holder: the worker in whose memory that state is, this one if it kept a copy; None if it is the
            checkpoint in the store.
        replays: iterations that it computes again from logs, while survivors wait.
        repeats: completed iterations that it loses and trains again.
        receives_from: the replica whose state it gets; None if it gets none.
        helps: workers whose microbatches it computes meanwhile.
    """

    rank: int
    machine: int
    lost: bool
    loads: int | None
    holder: int | None
    replays: int
    repeats: int
    receives_from: int | None
    helps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LossPlan:
    """The consequence of a loss of machines.

    Attributes:
        run_id: the run.
        failed: the slots of the lost machines.
        iteration: the iteration in which they are lost.
        as_of: when the journal last says that all workers trained, in Unix seconds. The plan is for then.
        outcome: what becomes of the run.
        mode: the recovery mode; empty if there is no recovery.
        reason: why there is no cheaper mode, or why the run ends.
        committed: the last committed checkpoint; None if there is none.
        in_memory: the newest memory checkpoint that is complete by then; None without any.
        spares: machines that wait already and take the places of lost ones, by slot.
        joining: slots that no spare fills.
        hosts: by such a slot, the slot of the machine that runs its workers, too, if no new machine joins.
        resume: the first iteration that is trained live again; None if there is no recovery.
        workers: what each worker does; empty if there is no recovery.
        iterations_again: iterations that are computed a second time until all are back where they were.
        estimate: how long it takes, part by part; None if there is no recovery.
    """

    run_id: str
    failed: tuple[int, ...]
    iteration: int
    as_of: float
    outcome: Outcome
    mode: str
    reason: str
    committed: int | None
    in_memory: int | None
    spares: dict[int, str]
    joining: tuple[int, ...]
    hosts: dict[int, int]
    resume: int | None
    workers: tuple[WorkerPart, ...]
    iterations_again: int
    estimate: Estimate | None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


class LossPlanner:
    """Answers what the run would do if machines were lost.

    Args:
        profiles: what its workers measured, by rank; some may be missing.

    Attributes:
        live: the newest archived state in which all workers trained, where the loss happens; None without
            any. Where entries of the journal are missing, it is the one before, with a newer checkpoint.
    """

    def __init__(self, journal: ArchivedJournal, profiles: Mapping[int, Worker]) -> None:
        self._run_id = journal.run_id
        self.live: State | None = None
        self._live_at = 0.0
        times: list[float] = []  # seconds of an iteration, from commit to commit
        before: tuple[int, int, float] | None = None  # generation, iteration and time of a commit
        for change in journal.changes():
            entry, state, event = change.entry, change.after, change.entry.event
            if _all_train(state):
                self.live, self._live_at = state, entry.at
            if isinstance(event, ev.CheckpointCommitted):
                now = (state.generation, event.iteration, entry.at)
                if before is not None and before[0] == now[0] and before[1] < now[1]:
                    times.append((now[2] - before[2]) / (now[1] - before[1]))
                before = now
        self._profiles = profiles
        intervals = [worker.measured.snapshot_every for _, worker in sorted(profiles.items())]
        self._snapshot_every = next((every for every in intervals if every is not None), None)
        self._past = journal.history.recoveries
        self._between_checkpoints_s = median(times) if times else None
        later = journal.after_gaps()
        if self.live is not None and later is not None and later.committed is not None:
            checkpoints = replace(self.live.checkpoints, committed=later.committed)
            self.live = replace(self.live, checkpoints=checkpoints)

    def plan(self, failed: Collection[int], *, iteration: int, spare: bool = True) -> LossPlan:
        """The consequence for the run if machines were lost.

        Args:
            failed: the slots of the lost machines.
            iteration: iterations that all workers have completed by then.
            spare: False if no machine waits and none joins.

        Raises:
            UsageError: there is no such machine, or the workers never trained.
        """
        live = self._live_with(failed)
        slots = tuple(sorted(set(failed)))
        begun = max(iteration, live.checkpoints.committed or 0)
        lost, spares, joining = _lose(live, slots, spare=spare)
        hosts = {
            slot: lost.membership.slots[host] for host, run in guests_wanted(lost).items() for slot in run
        }
        waits = not spare and not hosts.keys() >= set(joining) and lost.phase == Phase.FORMING
        in_memory = _newest_copy(live, self._snapshot_every, begun)
        after = _report(live, _join(lost, joining), slots, begun, in_memory)
        plan = after.plan if after.phase in (Phase.RECOVERING, Phase.LIVE) and not waits else None
        workers = tuple(_parts(live, plan, slots, begun)) if plan is not None else ()
        again = max((part.replays + part.repeats for part in workers), default=0)
        return LossPlan(
            run_id=self._run_id,
            failed=slots,
            iteration=begun,
            as_of=self._live_at,
            outcome=_outcome(after, plan, waits=waits),
            mode=plan.mode.value if plan is not None else "",
            reason=_reason(after, plan, waits=waits),
            committed=live.checkpoints.committed,
            in_memory=in_memory,
            spares=spares,
            joining=joining,
            hosts=hosts,
            resume=plan.resume if plan is not None else None,
            workers=workers,
            iterations_again=again,
            estimate=self._estimate(live, plan, workers) if plan is not None else None,
        )

    def _estimate(self, live: State, plan: Plan, workers: Collection[WorkerPart]) -> Estimate:
        costs = RunCosts(
            self._profiles,
            world_size=live.shape.machines * live.shape.workers_per_machine,
            per_machine=live.shape.workers_per_machine,
            past=self._past,
            between_checkpoints_s=self._between_checkpoints_s,
        )
        return costs.estimate(plan, repeats=max((part.repeats for part in workers), default=0))

    def _live_with(self, failed: Collection[int]) -> State:
        if self.live is None:
            raise UsageError(
                f"the journal of run {self._run_id} shows no moment in which all workers trained"
            )
        unknown = sorted(slot for slot in failed if slot not in self.live.membership.members)
        if unknown:
            raise UsageError(
                f"there is no machine {', '.join(map(str, unknown))} in run {self._run_id}: "
                f"they are numbered 0 to {self.live.shape.machines - 1}"
            )
        return self.live


def _all_train(state: State) -> bool:
    """Whether all workers are in iterations, and none is done."""
    done = state.round.finished or state.membership.ended or state.membership.exited
    return state.phase == Phase.LIVE and not done


def _lose(
    state: State, slots: tuple[int, ...], *, spare: bool
) -> tuple[State, dict[int, str], tuple[int, ...]]:
    """The state after the losses, the spares that took places, and the slots that are empty."""
    members = state.membership.members
    if not spare:
        for machine in state.membership.waiting():
            state = step(state, ev.MachineLost(machine=machine, reason="no spare is assumed"))
    for slot in slots:
        state = step(state, ev.MachineLost(machine=members[slot], reason="the loss that is asked about"))
    now = state.membership.members
    joining = tuple(slot for slot in slots if slot not in now)
    # Slots are filled once there is a spare for each of them; a machine fills the first that it may.
    waiting = state.membership.waiting() if joining else []
    spares = dict(zip(joining, waiting, strict=False))
    spares |= {slot: now[slot] for slot in slots if slot in now and now[slot] != members[slot]}
    return state, spares, tuple(slot for slot in joining if slot not in spares)


def _join(state: State, joining: tuple[int, ...]) -> State:
    for slot in joining:
        state = step(
            state,
            ev.MachineJoined(
                machine=f"the machine that joins for slot {slot}.0",
                preferred_slot=slot,
                setup=state.shape.setup,
                domain=state.domains[slot],
            ),
        )
    return state


def _newest_copy(live: State, every: int | None, iteration: int) -> int | None:
    """The newest iteration of which all workers have copies in two memories; None without any.

    The copy of the iteration that was completed last may still be on its way, and does not count.
    """
    plan = live.plan
    if every is None or plan is None or live.shape.machines < 2:
        return None
    found = newest_in_memory(live.round.statuses)
    there = [found.iteration] if found is not None and found.iteration <= plan.resume else []
    if plan.mode in (RecoveryMode.START, RecoveryMode.FALLBACK):  # then the first one follows at once
        there.append(plan.resume)
    there += [at for at in [(iteration - 1) // every * every] if at > plan.resume]
    return max(there, default=None)


def _report(
    live: State, state: State, failed: tuple[int, ...], iteration: int, in_memory: int | None
) -> State:
    """The state after the reports of all workers: survivors are whole, and replacements have nothing."""
    generation = state.generation
    placement = CopyPlacement.of(live.domains, live.shape.workers_per_machine)
    owners = placement.owners if placement is not None else (None,) * live.world_size
    copies = () if in_memory is None else (in_memory,)
    for rank, last in sorted(live.round.statuses.items()):
        if state.phase != Phase.AGREEING or state.generation != generation:
            return state
        known = replace(last, generation=generation, pipeline_known=True, dirty=None, updated=())
        known = replace(known, kept=copies, held=copies, held_of=owners[rank])
        if live.slot_of_rank(rank) in failed:
            report = replace(known, iteration=None, live=False, can_resend=False, log_gap_before=0)
            report = replace(report, kept=(), held=(), held_of=None)
        else:
            report = replace(known, iteration=iteration, live=True, can_resend=True)
        state = step(state, report)
    return state


def _outcome(after: State, plan: Plan | None, *, waits: bool) -> Outcome:
    if after.phase == Phase.ENDED:
        return Outcome.ENDS
    if waits:
        return Outcome.WAITS
    return Outcome.RECOVERS if plan is not None else Outcome.RESTARTS


def _reason(after: State, plan: Plan | None, *, waits: bool) -> str:
    if after.verdict is not None:
        return after.verdict.reason
    if waits:
        return "no machine takes the place of a lost one"
    return plan.reason if plan is not None else "there is no checkpoint to go on from"


def _parts(live: State, plan: Plan, failed: tuple[int, ...], iteration: int) -> Iterator[WorkerPart]:
    sources = {rank: transfer.source for transfer in plan.transfers for rank in transfer.targets}
    back = plan.mode in (RecoveryMode.START, RecoveryMode.MEMORY, RecoveryMode.FALLBACK)
    for rank, task in sorted(plan.tasks.items()):
        slot = live.slot_of_rank(rank)
        yield WorkerPart(
            rank=rank,
            machine=slot,
            lost=slot in failed,
            loads=task.load,
            holder=task.holder,
            replays=max(0, task.replay_until - task.begin),
            repeats=max(0, iteration - task.end) if back else 0,
            receives_from=sources.get(rank),
            helps=tuple(
                owner for replay in plan.parallel_replays if rank in replay.helpers for owner in replay.owners
            ),
        )
