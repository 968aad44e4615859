"""The events of a run that an operator would act on, as they follow from its journal. Pure.

Other such events are log records (``extra={"event": ...}``). ``event_stream.py`` brings both into one form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from swift_ft.cli.narrate import machine_in_words, pace_in_words, shares_in_words
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.recovery.protocol import step
from swift_ft.recovery.timeline import Recovery, Timeline
from swift_ft.units import format_seconds

OPERATOR_EVENTS = {
    "run_opened": ("info", "A run begins, or goes on from a checkpoint."),
    "run_live": ("info", "All workers train for the first time."),
    "spare_joined": ("info", "A machine waits as a spare."),
    "machine_lost": ("warning", "A machine with workers counts as failed."),
    "spare_lost": ("warning", "A spare machine counts as failed."),
    "spares_used_up": ("warning", "No spare is left: the next loss waits for a new machine."),
    "guest_declined": ("warning", "A machine cannot run an empty slot, too, for the reason given."),
    "machine_awaited": ("warning", "A slot is empty, and the run stands still until a machine joins."),
    "recovery_planned": ("info", "The way back to training: which one, why, and from which iteration."),
    "fell_back": ("error", "Completed iterations are lost: all return to a checkpoint, or start again."),
    "recovery_finished": ("warning", "All train again: by which way, how long it took, and what it cost."),
    "communication_failed": ("warning", "Connections broke, and no machine was found dead."),
    "replay_failed": ("warning", "A log cannot be replayed. The next way back is taken."),
    "help_declined": ("warning", "A survivor cannot help in a replay, which goes on without it."),
    "layout_changed": ("info", "Layers have moved: how many are on each stage from now on."),
    "layout_declined": ("warning", "A worker cannot take layers. They stay where they are."),
    "shares_changed": ("info", "Global batches are dealt anew: how many samples each replica gets."),
    "straggler": ("warning", "A worker is persistently slower than its peers: how many times."),
    "straggler_gone": ("info", "A worker that was slower than its peers is so no more."),
    "script_failed": ("warning", "The script raised or exited with an error. All start again."),
    "deadline_passed": ("warning", "Machines did not answer in time, and count as lost."),
    "drain_requested": ("info", "A machine is asked to hand over to a spare, and to leave."),
    "machine_left": ("info", "A machine has left because it was asked to. A spare takes its place."),
    "checkpoint_committed": ("info", "A global checkpoint counts from now on."),
    "checkpoint_requested": ("info", "A checkpoint is taken early, for the reason given."),
    "fault_injected": ("warning", "A fault of `--inject` is about to happen."),
    "run_ended": ("info or error", "The run is complete, or has ended for the reason given."),
    "launcher_failed": ("error", "A launcher ends although the run has not ended, for the reason given."),
    "hook_failed": ("warning", "The command of `--on-event` failed or took too long. Said once."),
    "events_dropped": ("warning", "Log records came faster than they could be written, and are missing."),
}
"""Level and meaning of each event that is not a log record."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One event for an operator.

    Attributes:
        event: its name, a key of :data:`OPERATOR_EVENTS`.
        message: one sentence, without a full stop.
        level: ``info``, ``warning`` or ``error``.
        machine: the slot of the machine that it is about.
        rank: the worker that it is about.
        fields: what else is known, JSON-ready.
    """

    event: str
    message: str
    level: str
    machine: int | None = None
    rank: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def lost_seconds(recoveries: list[Recovery]) -> float:
    """Seconds from the loss to live training, of all recoveries that have ended."""
    return sum(recovery.live - recovery.detected for recovery in recoveries if recovery.live is not None)


class JournalReader:
    """Reads a journal entry by entry.

    Attributes:
        state: the protocol's state.
    """

    def __init__(self) -> None:
        self.state = State()
        self._timeline = Timeline()

    @property
    def recoveries(self) -> list[Recovery]:
        """All recoveries so far. The last one may not have ended."""
        return self._timeline.recoveries

    def apply(self, entry: Entry) -> list[Notice]:
        """Apply the next entry; returns what an operator would act on."""
        before, self.state = self.state, step(self.state, entry.event)
        ended = self._timeline.apply(before, self.state, entry)
        notices = [*_of_event(before, self.state, entry.event), *_of_state(before, self.state)]
        if ended is not None:
            notices.append(_recovered(ended))
        if self.state.verdict is not None and before.verdict is None:
            notices.append(self._end())
        return notices

    def _end(self) -> Notice:
        verdict = self.state.verdict
        assert verdict is not None
        facts = {
            "ok": verdict.ok,
            "reason": verdict.reason,
            "exit_code": verdict.exit_code,
            "recoveries": len(self.recoveries),
            "lost_seconds": round(lost_seconds(self.recoveries), 3),
        }
        message = "the run is complete" if verdict.ok else f"the run ends: {verdict.reason}"
        return Notice("run_ended", message, "info" if verdict.ok else "error", fields=facts)


def _notice(event: str, message: str, **facts: Any) -> Notice:
    machine, rank = facts.pop("machine", None), facts.pop("rank", None)
    return Notice(event, message, OPERATOR_EVENTS[event][0], machine, rank, facts)


def _of_event(before: State, after: State, event: ev.Event) -> Iterator[Notice]:
    """The lines for one event. An event that came too late changes nothing, and is not told."""
    if after == before:
        return
    match event:
        case ev.JobOpened():
            text = f"a run on {event.machines} machines with {event.workers_per_machine} workers each"
            facts = {"machines": event.machines, "workers_per_machine": event.workers_per_machine}
            yield _notice("run_opened", text, checkpoint=event.checkpoint, **facts)
        case ev.GuestDeclined():
            text = f"{machine_in_words(after, event.machine)} cannot run an empty slot, too: {event.reason}"
            yield _notice("guest_declined", text, machine=after.slot_of(event.machine))
        case ev.MachineJoined() if event.machine in after.membership.spares and before.generation:
            if event.host:
                return
            spares = len(after.membership.spares)
            yield _notice("spare_joined", "a spare machine joins", name=event.machine, spares=spares)
        case ev.MachineLost():
            yield from _lost(before, event)
        case ev.DrainRequested():
            slot = before.slot_of(event.machine)
            yield _notice(
                "drain_requested",
                f"{machine_in_words(before, event.machine)} is asked to leave by {event.asked_by}",
                machine=slot,
                name=event.machine,
                by=event.asked_by,
            )
        case ev.CommunicationFailed():
            yield _of_worker("communication_failed", before, event.rank, event.reason)
        case ev.ReplayFailed():
            yield _of_worker("replay_failed", before, event.rank, event.reason)
        case ev.HelpDeclined():
            yield _of_worker("help_declined", before, event.rank, event.reason)
        case ev.LayoutDeclined():
            yield _of_worker("layout_declined", before, event.rank, event.reason)
        case ev.PaceNoted():
            name = "straggler" if event.permille > 1000 else "straggler_gone"
            yield _notice(
                name,
                pace_in_words(event),
                machine=after.slot_of_rank(event.rank),
                rank=event.rank,
                iteration=event.iteration,
                permille=event.permille,
            )
        case ev.ScriptFailed() if after.phase != Phase.ENDED:
            slot = before.slot_of(event.machine)
            yield _notice("script_failed", event.reason, machine=slot, exit_code=event.exit_code)
        case ev.DeadlinePassed():
            slots = [slot for name in event.machines if (slot := before.slot_of(name)) is not None]
            yield _notice("deadline_passed", event.reason, machines=slots)
        case ev.CheckpointCommitted() if after.checkpoints.committed != before.checkpoints.committed:
            text = f"the checkpoint of iteration {event.iteration} is committed"
            yield _notice("checkpoint_committed", text, iteration=event.iteration)
        case ev.CheckpointRequested() if after.checkpoints.requested != before.checkpoints.requested:
            text = f"worker {event.rank} asks for a checkpoint of iteration {event.iteration}: {event.reason}"
            slot = after.slot_of_rank(event.rank)
            about: dict[str, Any] = {"iteration": event.iteration, "reason": event.reason}
            yield _notice("checkpoint_requested", text, machine=slot, rank=event.rank, **about)
        case ev.FaultInjected():
            yield _notice("fault_injected", f"fault: {event.fault}", fault=event.fault)


def _lost(before: State, event: ev.MachineLost) -> Iterator[Notice]:
    facts = {"name": event.machine, "reason": event.reason, "reporter": event.reporter}
    if event.on_request:
        text = f"{machine_in_words(before, event.machine)} leaves: {event.reason}"
        yield _notice("machine_left", text, machine=before.slot_of(event.machine), **facts)
        return
    if (slot := before.slot_of(event.machine)) is not None:
        text = f"machine {slot} is lost: {event.reason}"
        yield _notice("machine_lost", text, machine=slot, **facts)
    elif event.machine in before.membership.spares:
        yield _notice("spare_lost", f"a spare machine is lost: {event.reason}", **facts)


def _of_worker(event: str, before: State, rank: int, reason: str) -> Notice:
    slot = before.slot_of_rank(rank)
    return _notice(event, f"worker {rank}: {reason}", machine=slot, rank=rank, reason=reason)


def _restarts_all(state: State) -> bool:
    return set(state.membership.started_in.values()) == {state.generation}


def _of_state(before: State, after: State) -> Iterator[Notice]:
    """The lines that follow from the state: who is missing, and which way back is taken."""
    if after.phase == Phase.ENDED:
        return
    if before.generation and before.membership.spares and not after.membership.spares:
        yield _notice("spares_used_up", "no spare machine is left")
    stood = before.phase == Phase.FORMING and len(before.membership.members) <= len(after.membership.members)
    if after.generation and after.phase == Phase.FORMING and not stood:
        empty = [slot for slot in range(after.shape.machines) if slot not in after.membership.members]
        yield _notice("machine_awaited", f"the run waits for a machine for slots {empty}", slots=empty)
    plan = after.plan
    if after.generation > before.generation > 0 and _restarts_all(after):
        reason = after.tries.fallback_reason or "there is no checkpoint to load, or the script has no session"
        facts = {"way": RecoveryMode.RESTART.value, "reason": reason, "resume": after.checkpoints.committed}
        yield _notice("fell_back", f"all processes start again: {reason}", **facts)
    if plan is not None and before.plan is None and after.generation > 1 and not _changes_layout(after, plan):
        facts = {"way": plan.mode.value, "reason": plan.reason, "resume": plan.resume}
        text = f"{plan.mode.value}: all go on with iteration {plan.resume}"
        yield _notice("recovery_planned", f"{text}: {plan.reason}" if plan.reason else text, **facts)
        if plan.mode == RecoveryMode.FALLBACK:
            text = f"all workers return to the checkpoint of iteration {plan.resume}: {plan.reason}"
            yield _notice("fell_back", text, **facts)
    if after.layouts.changes > before.layouts.changes:
        layers = after.layouts.current
        text = f"layers have moved: {', '.join(map(str, layers))} on the stages"
        yield _notice("layout_changed", text, layers=list(layers), iteration=after.layouts.since)
    if after.layouts.shares != before.layouts.shares:
        since, samples = after.layouts.shares[-1]
        yield _notice("shares_changed", shares_in_words(after), shares=list(samples), iteration=since)
    if after.phase == Phase.LIVE and before.phase != Phase.LIVE and after.generation == 1:
        resume = plan.resume if plan is not None else 0
        yield _notice("run_live", f"all train, from iteration {resume}", iteration=resume)


def _changes_layout(state: State, plan: Plan) -> bool:
    """Whether all have stopped because layers move, or batches are dealt anew: no state is recovered."""
    dealt_anew = any(since == plan.resume for since, _ in state.layouts.shares[-1:])
    return plan.new_layout is not None or (dealt_anew and plan.mode == RecoveryMode.CONTINUE)


def _recovered(recovery: Recovery) -> Notice:
    seconds = (recovery.live or recovery.detected) - recovery.detected
    lost = max(recovery.iterations_lost.values(), default=0)
    facts = {
        "way": recovery.mode,
        "reason": recovery.reason,
        "seconds": round(seconds, 3),
        "iterations_lost": lost,
        "resume": recovery.resume,
        "machines": recovery.slots,
        "replayed_iterations": max(recovery.replayed_iterations.values(), default=0),
    }
    text = f"all train again after {format_seconds(seconds)} ({recovery.mode}): {lost} iterations lost"
    return _notice("recovery_finished", text, **facts)
