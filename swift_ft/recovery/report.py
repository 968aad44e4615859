"""What a recovery was: its timeline, read from the journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.events import Entry
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, Way
from swift_ft.recovery.protocol import step

__all__ = ["Recovery", "recoveries"]


@dataclass(slots=True)
class Recovery:
    """One recovery, from the first loss to the first live generation after it. Times are Unix seconds.

    Attributes:
        machines: who was lost.
        reasons: what showed it, in the same order.
        slots: the slots that were empty.
        detected: when the first loss was in the journal.
        joined: when every slot had a machine again.
        reported: when everybody had left its groups and said where it stood.
        replayed: when the last replay was done.
        live: when everybody could go on.
        generation: the generation that went live.
        way: how (see :class:`swift_ft.recovery.plan.Way`).
        reason: why not a cheaper way.
        resume: the consensus iteration.
        replayed_iterations: by rank.
        from_peers: bytes of logs that a replay got from those who wrote them, by rank.
        from_store: and from the store.
        iterations_lost: completed iterations that each survivor lost, by rank.
        helpers: survivors that computed microbatches of the replay.
        ahead: survivors that had finished the interrupted iteration and served it from their log.
        restored: ranks whose whole state came from a replica: they had none, or one that was half updated.
        forwarded: survivors that a replica brought forward over the interrupted iteration.
        copied: parameters that came from a replica which had not updated them yet: their number, by rank.
        undone: parameters whose update was taken back, since no replica had the original: their number,
            by rank.
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
    way: str = ""
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

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def recoveries(entries: Iterable[Entry]) -> list[Recovery]:
    """All recoveries in a journal, also one that did not come to its end (``live`` is then None)."""
    state, found, current = State(), [], None
    for entry in entries:
        before, state = state, step(state, entry.event)
        begins = before.phase in (Phase.LIVE, Phase.AGREEING, Phase.RECOVERING) and before.generation > 0
        left_live = begins and state.phase in (Phase.FORMING, Phase.AGREEING) and state != before
        if (
            current is None
            and left_live
            and isinstance(entry.event, ev.Lost | ev.Interrupted | ev.CannotReplay | ev.TimedOut)
        ):
            current = Recovery(detected=entry.at)
            found.append(current)
        if current is None:
            continue
        _note_losses(current, before, state, entry)
        _note_progress(current, before, state, entry)
        if state.phase == Phase.LIVE:
            current.live = entry.at
            current = None
    return found


def _note_losses(current: Recovery, before: State, state: State, entry: Entry) -> None:
    event = entry.event
    if isinstance(event, ev.Lost | ev.TimedOut):
        for slot, machine in enumerate(before.members):
            if machine is not None and machine in state.fenced and machine not in state.members:
                current.machines.append(machine)
                current.reasons.append(event.reason)
                current.slots.append(slot)


def _note_progress(current: Recovery, before: State, state: State, entry: Entry) -> None:
    if state.generation > before.generation:
        current.joined, current.generation = entry.at, state.generation
    reports = {**before.reports}
    if isinstance(entry.event, ev.Reported) and before.phase == Phase.AGREEING:
        reports[entry.event.rank] = entry.event
    if before.phase == Phase.AGREEING and state.plan is not None:
        plan = state.plan
        current.reported = entry.at
        restarted = current.way == Way.RESTART and plan.way == Way.START
        current.way = Way.RESTART.value if restarted else plan.way.value
        current.reason, current.resume = plan.reason, plan.resume
        current.helpers = sorted(rank for shared in plan.shared for rank in shared.helpers)
        current.ahead = sorted(rank for rank, task in plan.tasks.items() if task.serve)
        _note_rungs(current, plan, reports)
        _note_iterations_lost(current, reports, {rank: task.begin for rank, task in plan.tasks.items()})
    elif before.phase == Phase.AGREEING and state.generation > before.generation and _restarts(entry.event):
        current.way = Way.RESTART.value
        _note_iterations_lost(current, reports, dict.fromkeys(reports, state.committed or 0))
    if isinstance(entry.event, ev.Ready) and entry.event.generation == state.generation:
        current.replayed = entry.at
        if entry.event.rank not in current.helpers:
            current.replayed_iterations[entry.event.rank] = entry.event.replayed
        current.from_peers[entry.event.rank] = entry.event.from_peers
        current.from_store[entry.event.rank] = entry.event.from_store


def _note_rungs(current: Recovery, plan: Plan, reports: Mapping[int, ev.Reported]) -> None:
    """What the exactness ladder came to. Undone comes first in a plan: what is copied then is exact."""
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


def _restarts(event: ev.Event) -> bool:
    """Only a restart of all processes opens a generation upon these."""
    return isinstance(event, ev.Reported | ev.Bare | ev.Failed)


def _note_iterations_lost(
    current: Recovery, reports: Mapping[int, ev.Reported], begins: Mapping[int, int]
) -> None:
    """A way back that is interrupted may have cost more than the one that follows it."""
    for rank, report in reports.items():
        if report.live and report.iteration is not None:
            lost = max(0, report.iteration - begins[rank])
            current.iterations_lost[rank] = max(lost, current.iterations_lost.get(rank, 0))
