"""Recoveries, as the journal tells them: what each took, what it cost, and where it went on. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import evidence_of
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.recovery.topology import replica_sets


@dataclass(slots=True)
class Recovery:
    """One recovery, from the first loss to the first live generation after it. Times are Unix seconds.

    Attributes:
        machines: the lost machines.
        reasons: how each loss was detected, in the same order.
        slots: the slots that the losses emptied, in the same order.
        detected: when the journal had the first loss.
        joined: when every slot had a machine again.
        reported: when all workers had left their groups and reported their status.
        replayed: when the last replay was complete; None if nothing was replayed.
        live: when training could continue; None if the recovery did not end.
        generation: the generation that went live.
        mode: the recovery mode (see :class:`swift_ft.recovery.plan.RecoveryMode`).
        reason: why no cheaper mode was possible.
        resume: the consensus iteration.
        replayed_iterations: by rank.
        from_peers: bytes of logs that a replay read from the workers that wrote them, by rank.
        from_store: bytes of logs that a replay read from the store, by rank.
        iterations_lost: completed iterations that each survivor lost, by rank.
        helpers: survivors that computed microbatches of the replay.
        ahead: survivors that had completed the interrupted iteration, and resent its messages from their log.
        restored: ranks that received their whole state from a replica: they had none, or a half-updated one.
        forwarded: survivors that received the state after the interrupted iteration from a replica.
        copied: number of parameters received from a replica that had not updated them yet, by rank.
        undone: number of parameters whose update was undone because no replica had the original, by rank.
        undone_exactly: those of these ranks that have said that the undo gives back every bit.
        statistics_from: replica that gave a worker its running statistics, by the worker's rank. The worker's
            own, of the data that it had seen, are lost.
    """

    machines: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    detected: float = 0.0
    joined: float | None = None
    reported: float | None = None
    replayed: float | None = None
    live: float | None = None
    generation: int = 0
    mode: str = ""
    reason: str = ""
    resume: int = 0
    replayed_iterations: dict[int, int] = field(default_factory=dict)
    from_peers: dict[int, int] = field(default_factory=dict)
    from_store: dict[int, int] = field(default_factory=dict)
    iterations_lost: dict[int, int] = field(default_factory=dict)
    helpers: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    forwarded: list[int] = field(default_factory=list)
    copied: dict[int, int] = field(default_factory=dict)
    undone: dict[int, int] = field(default_factory=dict)
    undone_exactly: list[int] = field(default_factory=list)
    statistics_from: dict[int, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the loss to live training; 0 for a recovery that did not end."""
        return 0.0 if self.live is None else self.live - self.detected

    @property
    def most_lost(self) -> int:
        """Completed iterations that are computed again: those of the survivor that lost most."""
        return max(self.iterations_lost.values(), default=0)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


@dataclass(slots=True)
class Course:
    """A recovery, and the entries at which it went on. Each is the last of several that all waited for.

    Attributes:
        recovery: what it took and cost.
        loss: what it began with.
        fault: the last injected fault before it, if one was injected since all were live.
        failure: the first event of it that was a failure; None as long as all of it was on purpose.
        link: where that was one of communication, the slots of the machines that it tells of, by machine.
        late: the first deadline that passed in it; None if all have answered in time.
        joined: every slot has a machine again.
        reported: all workers have reported in that generation.
        live: training goes on, or all processes of a script without a session have started again; None before
            that.
        workers: of the job, when that is so.
    """

    recovery: Recovery
    loss: Entry
    fault: Entry | None = None
    failure: Entry | None = None
    link: dict[str, int] = field(default_factory=dict)
    late: Entry | None = None
    joined: Entry | None = None
    reported: Entry | None = None
    live: Entry | None = None
    workers: int = 0

    def apply(self, before: State, state: State, entry: Entry) -> None:
        """Note the loss, then all entries that follow, each with the state before and after it."""
        if self.failure is None and state is not before and _is_failure(before, state, entry.event):
            self.failure, self.link = entry, dict(_ends_of_link(before, entry.event))
        if self.late is None and state is not before and isinstance(entry.event, ev.DeadlinePassed):
            self.late = entry
        _note_losses(self.recovery, before, state, entry)
        _note_progress(self.recovery, before, state, entry)
        if state.generation > before.generation:
            self.joined, self.reported = entry, None
        if before.phase == Phase.AGREEING and state.plan is not None:
            self.reported = entry
        if begun := _is_begun_without_session(before, state):
            self.recovery.mode = RecoveryMode.RESTART.value
        if begun or state.phase == Phase.LIVE:
            self.live, self.recovery.live, self.workers = entry, entry.at, state.world_size


INTERRUPTIONS = (
    ev.MachineLost,
    ev.CommunicationFailed,
    ev.ReplayFailed,
    ev.CheckpointDamaged,
    ev.DeadlinePassed,
)
"""The events that can begin a recovery. Any other event that opens a generation is not a loss."""


def interrupts(before: State, state: State) -> bool:
    """Whether one of these events, between two states, has interrupted the job."""
    begins = before.phase in (Phase.LIVE, Phase.AGREEING, Phase.RECOVERING) and before.generation > 0
    return begins and state.phase in (Phase.FORMING, Phase.AGREEING) and state != before


def _is_begun_without_session(before: State, state: State) -> bool:
    """Whether all processes have started again, and nobody will ever say that they train."""
    opens = state.generation > before.generation
    return opens and not state.has_sessions and {*state.membership.started_in.values()} == {state.generation}


def _is_failure(before: State, state: State, event: ev.Event) -> bool:
    """Whether an event interrupts a job against everybody's will."""
    on_purpose = isinstance(event, ev.MachineLost) and (event.on_request or event.starts_again)
    if isinstance(event, ev.ScriptFailed):  # else it is an incident of its own
        return any(True for _ in _lost_between(before, state))
    return isinstance(event, INTERRUPTIONS) and not on_purpose


def _ends_of_link(before: State, event: ev.Event) -> Iterator[tuple[str, int]]:
    """The machine on which communication broke, and the one that its text names, with their slots."""
    if not isinstance(event, ev.CommunicationFailed):
        return
    slot, known = before.slot_of_rank(event.rank), before.membership
    own = known.members.get(slot)
    if own is not None:
        yield own, slot
    others = [machine for machine in known.by_slot if machine != own and _names(event.reason, machine, known)]
    if len(others) == 1:  # several machines of one host cannot be told apart
        yield others[0], known.slots[others[0]]


def _names(text: str, machine: str, known: Membership) -> bool:
    """Whether a text has the host of a machine's address as a word."""
    host = known.addresses.get(machine, "").rpartition(":")[0].strip("[]")
    return bool(host) and re.search(rf"(?<![\w.-]){re.escape(host)}(?!\w|[.-]\w)", text) is not None


def loss_in_words(event: ev.Event) -> str:
    """The reason of an event, and where a script was that has failed."""
    reason: str = getattr(event, "reason", "")
    if isinstance(event, ev.ScriptFailed) and (evidence := evidence_of(event)):
        return f"{reason} ({'; '.join(evidence)})"
    return reason


def _lost_between(before: State, state: State) -> Iterator[tuple[int, str]]:
    """Machines that an event has fenced, and the slots that it has emptied."""
    for slot, machine in enumerate(before.members):
        if machine is None or machine in before.membership.fenced:
            continue
        if machine in state.membership.fenced and machine not in state.membership.slots:
            yield slot, machine


def _note_losses(current: Recovery, before: State, state: State, entry: Entry) -> None:
    event = entry.event
    if isinstance(event, ev.MachineLost | ev.DeadlinePassed | ev.ScriptFailed):
        for slot, machine in _lost_between(before, state):
            current.machines.append(machine)
            current.reasons.append(loss_in_words(event))
            current.slots.append(slot)


def _note_progress(current: Recovery, before: State, state: State, entry: Entry) -> None:
    if state.generation > before.generation:
        current.joined, current.generation = entry.at, state.generation
    if before.phase == Phase.AGREEING and state.plan is not None:
        plan, reports = state.plan, _reports(before, entry)
        current.reported = entry.at
        restarted = current.mode == RecoveryMode.RESTART and plan.mode == RecoveryMode.START
        current.mode = RecoveryMode.RESTART.value if restarted else plan.mode.value
        current.reason, current.resume = plan.reason, plan.resume
        current.helpers = sorted(rank for replay in plan.parallel_replays for rank in replay.helpers)
        current.ahead = sorted(rank for rank, task in plan.tasks.items() if task.resend_from_log)
        _note_rungs(current, plan, reports)
        current.statistics_from.update(lost_statistics(plan, reports))
        _note_iterations_lost(current, reports, {rank: task.begin for rank, task in plan.tasks.items()})
    elif _restarts(before, state, entry.event):
        current.mode, reports = RecoveryMode.RESTART.value, _reports(before, entry)
        _note_iterations_lost(current, reports, dict.fromkeys(reports, state.checkpoints.committed or 0))
    change = before.worlds.change
    if change is not None and change.held and state.worlds.present.number == change.world.number:
        # Copies of survivors' states may be of an earlier iteration than these.
        survivors, since = before.round.statuses, state.worlds.present.since
        _note_iterations_lost(current, survivors, dict.fromkeys(survivors, since))
    if isinstance(entry.event, ev.WorkerReady) and entry.event.generation == state.generation:
        current.replayed = entry.at
        if entry.event.rank not in current.helpers:
            current.replayed_iterations[entry.event.rank] = entry.event.replayed
        current.from_peers[entry.event.rank] = entry.event.from_peers
        current.from_store[entry.event.rank] = entry.event.from_store


def _reports(before: State, entry: Entry) -> dict[int, ev.StatusReported]:
    """All reports of a generation, the last one among them. Costs the size of the job."""
    reports = dict(before.round.statuses)
    if isinstance(entry.event, ev.StatusReported):
        reports[entry.event.rank] = entry.event
    return reports


def _note_rungs(current: Recovery, plan: Plan, reports: Mapping[int, ev.StatusReported]) -> None:
    """Note what replicas gave and what was undone. Undo comes first, so the copies that follow are exact."""
    whole = sorted(rank for t in plan.transfers if t.parameters is None for rank in t.targets)
    behind = {r for r in whole if (at := reports[r].iteration) is not None and at < plan.tasks[r].begin}
    current.restored = [rank for rank in whole if rank not in behind]
    current.forwarded = sorted(behind)
    copied: dict[int, set[int]] = {}
    for transfer in plan.transfers:
        for rank in transfer.targets:
            copied.setdefault(rank, set()).update(transfer.parameters or ())
    current.copied = {rank: len(found) for rank, found in sorted(copied.items()) if found}
    undone = {rank: set(task.undo) - copied.get(rank, set()) for rank, task in plan.tasks.items()}
    current.undone = {rank: len(left) for rank, left in sorted(undone.items()) if left}
    current.undone_exactly = [rank for rank in current.undone if reports[rank].undoes_exactly]


def lost_statistics(plan: Plan, reports: Mapping[int, ev.StatusReported]) -> dict[int, int]:
    """Maps each rank that loses its running statistics to the rank from which it takes them.

    One replica's are in a checkpoint or come with a replica's state. Those of the others are gone, unless
    DDP keeps them equal.
    """
    found: dict[int, int] = {}
    for replicas in replica_sets(reports):
        if not any(reports[rank].own_statistics for rank in replicas):
            continue
        owner, *others = replicas  # the first one saves for all of them
        found.update((rank, owner) for rank in others if plan.tasks[rank].load)
    for transfer in plan.transfers:
        if transfer.parameters is None and reports[transfer.source].own_statistics:
            found.update((rank, transfer.source) for rank in transfer.targets if not reports[rank].live)
    return found


def _restarts(before: State, state: State, event: ev.Event) -> bool:
    """Whether an event opens a generation that restarts all processes."""
    if isinstance(event, ev.ReplayFailed):
        return event.diverged and {*state.membership.started_in.values()} == {state.generation}
    opens = before.phase == Phase.AGREEING and state.generation > before.generation
    return opens and isinstance(event, ev.StatusReported | ev.SessionlessWorkers | ev.ScriptFailed)


def _note_iterations_lost(
    current: Recovery, reports: Mapping[int, ev.StatusReported], begins: Mapping[int, int]
) -> None:
    """Keep the larger loss: an interrupted recovery may have cost more than the one that follows it."""
    for rank, report in reports.items():
        if report.live and report.iteration is not None:
            lost = max(0, report.iteration - begins[rank])
            current.iterations_lost[rank] = max(lost, current.iterations_lost.get(rank, 0))
