"""The news in a journal: what an entry means to a person who runs the job. Pure.

An entry that comes too late changes nothing, and is not told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from swift_ft.cli.incident_words import incident_facts
from swift_ft.cli.news import NEWS, SILENT, News, news
from swift_ft.cli.words import cost_in_words, machine_in_words, numbers_in_words, plan_in_words
from swift_ft.recovery import events as ev
from swift_ft.recovery import exclusion
from swift_ft.recovery.audit_orders import has_replicas
from swift_ft.recovery.audits import Judgement, Mark, Wrong, judged_since
from swift_ft.recovery.history import History, StateChange
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.recovery.recoveries import lost_statistics
from swift_ft.units import counted, format_seconds, named

_Told = tuple[str, dict[str, Any]]
"""The name of a kind, and what is known. ``level`` and ``weight`` may be other ones than the table's."""


def news_of(change: StateChange, history: History) -> list[News]:
    """Tell a person what an entry means.

    Args:
        change: the entry, and what it changed.
        history: up to this entry.
    """
    if change.after == change.before:
        return []
    at = change.entry.at - (history.started_at or 0.0)
    told = (*_of_event(change), *_of_world(change), *_of_state(change), *_of_end(change, history))
    return [news(event, at, **facts) for event, facts in told]


def _of_event(change: StateChange) -> Iterator[_Told]:
    """The event itself."""
    before, after, event = change.before, change.after, change.entry.event
    facts = _facts_of(before, event)
    match event:
        case ev.JobOpened(machines=machines, workers_per_machine=each):
            size = f"{counted(machines, 'machine')}, {counted(each, 'worker')} on each"
            yield "run_opened", {**facts, "size": size}
        case ev.MachineJoined(host=host) if host:
            yield "guest_joined", {"of": machine_in_words(after, host)}
        case ev.MachineJoined() if before.generation and event.machine in after.membership.spares:
            yield "spare_joined", {**facts, "spares": len(after.membership.spares)}
        case ev.DrainRequested(asked_by=by):
            yield "drain_requested", {**facts, "by": by}
        case ev.MachinesRequested() if after.membership.requested != before.membership.requested:
            yield "machines_requested", {**facts, "count": counted(len(event.slots), "machine")}
        case ev.MachineLost(on_request=True):
            yield "machine_left", facts
        case ev.MachineLost() if facts["machine"] is not None:
            yield "machine_lost", facts
        case ev.MachineLost() if event.machine in before.membership.spares:
            yield "spare_lost", facts
        case ev.ReplayFailed():
            yield "replay_failed", {**facts, "why": event.reason, **_refusal(before, after, facts["machine"])}
        case ev.ScriptFailed() if after.phase != Phase.ENDED:
            guest = event.machine in before.membership.hosts
            yield "script_failed", {**facts, "remark": _OF_A_GUEST if guest else ""}
        case ev.DeadlinePassed() if after.phase != Phase.ENDED:
            slots = [slot for name in event.machines if (slot := before.slot_of(name)) is not None]
            yield "deadline_passed", {**facts, "machines": slots}
        case ev.WorkerReady(replayed=replayed) if replayed:
            yield "replayed", {**facts, "iterations": counted(replayed, "iteration")}
        case ev.PaceNoted(permille=permille):
            name = "straggler" if permille > 1000 else "straggler_gone"
            yield name, {**facts, "times": permille / 1000}
        case ev.StepDiffered(kind="not deterministic"):
            yield "not_deterministic", facts
        case ev.StepDiffered(ranks=()):
            yield "result_changed", {**facts, "what": _what_counts(event)}
        case ev.StepDiffered():
            yield "machine_wrong", {**facts, **_who_is_wrong(before, event)}
        case ev.AuditBegun():
            for judgement in judged_since(change.before.audits, change.after.audits):
                yield _judged({**facts, "problem": _COMES_TO_NOTHING}, judgement)
        case ev.AuditEnded():
            yield from _of_audit(change, event)
        case ev.CheckpointCommitted() if after.checkpoints.committed != before.checkpoints.committed:
            yield "checkpoint_committed", facts
        case ev.CheckpointRequested() if after.checkpoints.requested != before.checkpoints.requested:
            yield "checkpoint_requested", facts
        case ev.WorkerFinished() if after.all_finished:
            yield "all_finished", {}
        case _ if type(event) in _AS_THEY_ARE:
            yield _AS_THEY_ARE[type(event)], facts


_AS_THEY_ARE: dict[type[ev.Event], str] = {
    ev.GuestDeclined: "guest_declined",
    ev.HealthCheckFailed: "health_check_failed",
    ev.CommunicationFailed: "communication_failed",
    ev.CheckpointDamaged: "checkpoint_damaged",
    ev.HelpDeclined: "help_declined",
    ev.LayoutDeclined: "layout_declined",
    ev.FaultInjected: "fault_injected",
}
"""Events that say all themselves."""
_COMES_TO_NOTHING = "its logs or checkpoints count no more"
_OF_A_GUEST = (
    " (that worker was a guest's, beside the machine's own: two of them cannot have one port, lock or device)"
)


def _facts_of(before: State, event: ev.Event) -> dict[str, Any]:
    """The event's own facts, and which machine it is about: by slot (``machine``), ``name``, and ``who``."""
    facts: dict[str, Any] = {one.name: getattr(event, one.name) for one in fields(event)}
    if (rank := facts.get("rank")) is not None:
        return {**facts, "machine": before.slot_of_rank(rank), "who": f"worker {rank}"}
    if (name := facts.get("machine")) is not None:
        slot, who = before.slot_of(name), machine_in_words(before, name)
        return {**facts, "machine": slot, "name": name, "who": who}
    return facts


def _who_is_wrong(before: State, event: ev.StepDiffered) -> dict[str, Any]:
    slots = sorted({before.slot_of_rank(rank) for rank in event.ranks})
    one = len(slots) == 1
    who = f"machine {slots[0]}" if one else f"one of {named('machine', slots)}"
    return {"machine": slots[0] if one else None, "who": who, "what": _what_counts(event)}


def _what_counts(event: ev.StepDiffered) -> str:
    return "; the result that came out twice counts" if event.right else "; its result may be wrong"


def _of_audit(change: StateChange, event: ev.AuditEnded) -> Iterator[_Told]:
    before, after = change.before.audits, change.after.audits
    slot = change.before.slot_of_rank(event.rank) if event.iteration is not None else event.slot
    facts = {
        **_facts_of(change.before, event),
        "machine": slot,
        "who": f"machine {slot}",
        "name": event.machine,
    }
    judgements = judged_since(before, after)
    if event.problem and not judgements:
        yield "audit_failed", facts
    elif event.iteration is not None and not judgements:
        yield "audit_differs", facts
    for judgement in judgements:
        yield _judged(facts, judgement)
    if after.marks != before.marks:
        yield "audit_marked", {**facts, **_of_mark(after.marks[-1], of_a_step=has_replicas(change.after))}


def _judged(facts: dict[str, Any], judgement: Judgement) -> _Told:
    found = {
        **facts,
        "rank": judgement.rank,
        "ranks": (judgement.rank,),
        "iteration": judgement.iteration,
        "tensors": judgement.tensors,
        "kind": "audit",
        "right": False,
        "machine": judgement.slot,
        "who": f"machine {judgement.slot}",
    }
    first, last = judgement.spares[0], judgement.spares[-1]
    twice = f"two replays on {first}" if first == last else f"replays on {first} and {last}"
    what = f"; {twice} agree with each other"
    match judgement.wrong:
        case Wrong.MACHINE:
            return "machine_wrong", {**found, "what": what}
        case Wrong.SEVERAL:
            who = f"one of {named('machine', judgement.slots)}"
            return "machine_wrong", {**found, "machine": None, "who": who, "what": what}
        case Wrong.LINK:
            return "message_changed", found
        case Wrong.SPARE:
            return "spare_wrong", {**found, "name": first}
        case Wrong.NOBODY:
            return "not_deterministic", found
        case Wrong.UNDECIDED:
            return "audit_undecided", found


def _of_mark(mark: Mark, *, of_a_step: bool) -> dict[str, Any]:
    by = "" if mark.whole else f" for {named('machine', mark.clean)}" if mark.clean else " for no machine"
    what = f"the checkpoint of iteration {mark.until} is audited from that of iteration {mark.begin} on{by}"
    if of_a_step:
        what = f"the step after the checkpoint of iteration {mark.begin} is audited{by}"
    return {"begin": mark.begin, "until": mark.until, "clean": mark.clean, "whole": mark.whole, "what": what}


def _refusal(before: State, after: State, slot: int) -> dict[str, str]:
    """For a failed replay that shows that the machine computes other results than all others."""
    if len(after.membership.refused) <= len(before.membership.refused):
        return {}
    who = f"machine {slot} is refused, and the next one takes its slot"
    return {"who": who, "why": after.membership.refused[str(before.members[slot])]}


def _of_world(change: StateChange) -> Iterator[_Told]:
    """The phase of a change to another world."""
    world, before, after = change.world, change.before, change.after
    if world is None or after.phase == Phase.ENDED:
        return
    at, pending = change.entry.at, after.layouts.pending
    size = {"machines": len(world.machines), "size": counted(len(world.machines), "machine")}
    facts = {"world": world.world, "iteration": world.iteration, "reason": world.reason}
    if before.worlds.planned != after.worlds.planned:
        why = f": {world.reason}" if world.reason else ""
        yield "change_planned", {**facts, **size, "by": world.asked_by, "why": why}
    elif isinstance(change.entry.event, ev.NextPrepared) and world.prepared == at:
        yield "change_prepared", facts
    elif pending is not None and pending.world and before.layouts.pending is None:
        yield "change_stops", {**facts, "last": pending.iteration - 1}
    elif before.worlds.change is not None and after.worlds.change is None:
        if world.switched is None:
            yield "change_given_up", {**facts, "reason": world.given_up}
        else:
            yield "change_taken", {**facts, "generation": after.generation}
    elif world.live is not None and (seconds := world.pause_s) is not None:
        took = {"seconds": round(seconds, 3), "duration": format_seconds(seconds)}
        yield "world_changed", {**facts, **size, **took, "iteration": after.plan.resume if after.plan else 0}


def _of_state(change: StateChange) -> Iterator[_Told]:
    """Consequences for the job: who is missing, which way back is taken, and that all train."""
    before, after = change.before, change.after
    switches = after.worlds.present != before.worlds.present  # which is told as such
    if after.phase == Phase.ENDED:
        return
    if after.membership.losses is not before.membership.losses:
        yield from _left_out(before, after)
    if before.generation and before.membership.spares and not after.membership.spares:
        yield "spares_used_up", {}
    stood = before.phase == Phase.FORMING and len(before.membership.members) <= len(after.membership.members)
    if after.generation and after.phase == Phase.FORMING and not stood:
        empty = [slot for slot in range(after.shape.machines) if slot not in after.membership.members]
        yield "machine_awaited", {"slots": empty}
    if after.generation > before.generation and not switches:
        yield from _generation(before, after, change.entry.event)
    if after.layouts.shares != before.layouts.shares and not switches:
        since, samples = after.layouts.shares[-1]
        facts = {"shares": list(samples), "counts": numbers_in_words(samples), "iteration": since}
        yield "shares_changed", {"generation": after.generation, **facts}
    if after.plan is not None and before.plan is None:
        yield from _plan(after, after.plan)
    if after.layouts.changes > before.layouts.changes and not switches:
        layers = after.layouts.current
        facts = {"layers": list(layers), "counts": numbers_in_words(layers), "iteration": after.layouts.since}
        yield "layout_changed", facts
    goes_on = after.phase == Phase.LIVE and before.phase != Phase.LIVE and change.ended is None
    if goes_on and change.world is None:
        iteration = after.plan.resume if after.plan is not None else 0
        yield "run_live" if after.generation == 1 else "all_go_on", {"iteration": iteration}


def _of_end(change: StateChange, history: History) -> Iterator[_Told]:
    """The end of a recovery, or of the run."""
    if (recovery := change.ended) is not None:
        facts = {
            "way": recovery.mode,
            "reason": recovery.reason,
            "seconds": round(recovery.seconds, 3),
            "iterations_lost": recovery.most_lost,
            "resume": recovery.resume,
            "machines": recovery.slots,
            "replayed_iterations": max(recovery.replayed_iterations.values(), default=0),
            "duration": format_seconds(recovery.seconds),
            "cost": cost_in_words(recovery),
        }
        yield "recovery_finished", facts
    if change.incident is not None:
        yield "incident", incident_facts(change.incident)
    verdict = change.after.verdict
    if verdict is not None and change.before.verdict is None:
        facts = {
            "ok": verdict.ok,
            "reason": verdict.reason,
            "exit_code": verdict.exit_code,
            "recoveries": len(history.recoveries) if change.after.has_sessions else 0,
            "restarts": change.after.tries.restarts,
            "lost_seconds": round(history.lost_seconds(), 3),
            "ending": "the run is complete" if verdict.ok else f"the run ends: {verdict.reason}",
            "level": "info" if verdict.ok else "error",
        }
        yield "run_ended", facts


def _left_out(before: State, after: State) -> Iterator[_Told]:
    """Machines and failure domains that are not taken any more."""
    losses = after.membership.losses
    for identity in sorted(exclusion.machines_left_out(after) - exclusion.machines_left_out(before)):
        reason, count = exclusion.machine_in_words(after, identity), losses[identity].count
        yield "machine_left_out", {"name": identity, "reason": reason, "losses": count}
    for domain in sorted(exclusion.domains_left_out(after) - exclusion.domains_left_out(before)):
        count = sum(lost.count for lost in losses.values() if lost.domain == domain)
        reason = exclusion.domain_in_words(after, domain)
        yield "machine_left_out", {"name": domain, "reason": reason, "losses": count}


def _generation(before: State, after: State, event: ev.Event) -> Iterator[_Told]:
    """A new generation: who fills the slots that were empty, or why all meet again."""
    membership, generation = after.membership, after.generation
    if before.generation == 0:
        yield "all_here", {}
        return
    if set(membership.started_in.values()) == {generation}:
        yield "fell_back", _restart(after, event)
        return
    if after.layouts.pending is not None:
        yield "all_stop", {"generation": generation}
        return
    if after.layouts.shares != before.layouts.shares:
        return  # is told with the shares
    filled = {slot: name for slot, name in enumerate(after.members) if name not in before.membership.slots}
    hosts = {slot: membership.hosts.get(str(name)) for slot, name in filled.items()}
    replaced = " and ".join(f"machine {slot}" for slot, host in hosts.items() if host is None)
    how = [f"a replacement for {replaced}"] if replaced else []
    how += [
        f"{machine_in_words(after, host)} runs the workers of machine {slot}, too"
        for slot, host in hosts.items()
        if host is not None
    ]
    yield "generation_formed", {"generation": generation, "how": ", ".join(how) or "all meet again"}


def _begins_a_world(state: State, plan: Plan) -> bool:
    """Whether the workers of another world go on with what they have taken: no state is recovered."""
    first = set(state.membership.started_in.values()) == {state.generation}
    return bool(state.worlds.present.number) and first and plan.mode == RecoveryMode.CONTINUE


def _restart(state: State, event: ev.Event) -> dict[str, Any]:
    """All processes start again: what with, and why."""
    committed, reason = state.checkpoints.committed, state.tries.fallback_reason
    if isinstance(event, ev.SessionlessWorkers):
        reason = (
            "no worker had created a swift_ft.Session. If the script has one, create it before all that "
            "takes long; without one, a loss costs all that the script's own checkpoints lack"
        )
    loads = committed is not None and state.has_sessions
    begin = f" from the checkpoint of iteration {committed}" if loads else ""
    text = f"generation {state.generation}: all processes start again{begin}"
    return {
        "way": RecoveryMode.RESTART.value,
        "reason": reason or getattr(event, "reason", ""),  # a failed script has just been told
        "resume": committed,
        "way_in_words": f"{text}: {reason}" if reason else text,
    }


def _plan(state: State, plan: Plan) -> Iterator[_Told]:
    """A plan was made. Of a fallback, JSON lines have both what was planned and that it costs iterations."""
    facts = {"way": plan.mode.value, "reason": plan.reason, "resume": plan.resume}
    facts["way_in_words"] = plan_in_words(plan)
    dealt_anew = any(since == plan.resume for since, _ in state.layouts.shares[-1:])
    falls_back = plan.mode == RecoveryMode.FALLBACK
    if state.generation == 1 and not falls_back:
        yield "all_start", facts
    elif _begins_a_world(state, plan):
        return  # it was told that it takes over
    elif plan.new_layout is not None or (dealt_anew and plan.mode == RecoveryMode.CONTINUE):
        yield "layout_planned", facts  # no state is recovered
    else:
        yield "recovery_planned", {**facts, "weight": SILENT if falls_back else NEWS}
    if falls_back:
        yield "fell_back", facts
    lost = lost_statistics(plan, state.round.statuses) if plan.tasks else {}
    for rank, source in sorted(lost.items()):
        yield "statistics_lost", {"rank": rank, "source": source}
