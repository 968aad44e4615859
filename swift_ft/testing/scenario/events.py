"""The lines of a scenario that are events."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence

from swift_ft.config.run_plan import PlannedPipeline, RunPlan
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import event_from_dict, event_to_dict
from swift_ft.recovery.job_state import State
from swift_ft.testing.scenario.line import (
    NOTHING,
    Line,
    ScenarioError,
    next_ranks_of,
    number_or_none,
    numbers,
    ranks_of,
    started_in_of,
)


def read_events(name: str, line: Line, state: State) -> Sequence[ev.Event]:
    """The events of a line, one for each rank or machine that it names.

    Raises:
        ScenarioError: if there is no event of this name.
    """
    reader = _READERS.get(name)
    if reader is None:
        raise ScenarioError(f"no such event: {name}")
    return reader(line, state)


def _open(line: Line, _: State) -> list[ev.Event]:
    limit, checkpoint = line.option("max-failures"), line.option("checkpoint")
    machine_limit = line.number("max-machine-failures", 0) or None
    return [
        ev.JobOpened(
            machines=int(line.take()),
            workers_per_machine=line.number("workers", 1),
            restarts=line.number("restarts", 0),
            max_failures=None if limit is None else int(limit),
            checkpoint=None if checkpoint is None else int(checkpoint),
            setup=_setup(line),
            min_machines=line.number("min", 0) or None,
            shrinks=(line.option("on-loss") or "guest") == "shrink",
            max_machine_failures=machine_limit,
        )
    ]


def _join(line: Line, _: State) -> list[ev.Event]:
    slot = line.option("slot")
    preferred = None if slot is None else int(slot)
    setup, host, identity = _setup(line), line.option("on") or "", line.option("identity") or ""
    domain = line.option("domain") or ""
    return [
        ev.MachineJoined(
            machine=m,
            preferred_slot=preferred,
            address=f"{m}:1",
            setup=setup,
            host=host,
            identity=identity,
            domain=domain,
        )
        for m in line.rest()
    ]


def _setup(line: Line) -> tuple[str, ...]:
    torch = line.option("torch")
    return () if torch is None else (f"torch: {torch}",)


def _lost(line: Line, _: State) -> list[ev.Event]:
    reporter = line.option("by") or ""
    on_request, silent = (line.flag(name) for name in ("on-request", "silent"))
    stopped_by, starts_again = line.number("signal", 0), line.flag("starts-again")
    cause, ran_s = line.option("cause") or "", line.number("ran", 0)
    machine, reason = line.take(), line.text("was killed")
    return [
        ev.MachineLost(
            machine=machine,
            reason=reason,
            reporter=reporter,
            on_request=on_request,
            silent=silent,
            stopped_by=stopped_by,
            starts_again=starts_again,
            cause=cause,
            ran_s=ran_s,
        )
    ]


def _report(line: Line, state: State) -> list[ev.Event]:
    ranks, generation = ranks_of(state, line.take()), _generation(line, state)
    dirty, holds, stages = line.option("dirty"), line.option("holds"), numbers(line.option("stages"))
    undoable, updated = numbers(line.option("undoable")), numbers(line.option("updated"))
    pipeline, known = line.number("pipeline", 0), not line.flag("shapes-unknown")
    gap_before = line.number("log-gap-before", 0)
    replaying, can_resend = line.flag("replaying"), not line.flag("cannot-resend")
    rounds = line.flag("rounds")
    completes, no_update, fresh = line.flag("completes"), line.flag("no-update"), not line.flag("spoiled")
    iteration = None if line.take() == NOTHING else int(line.take())
    steps = line.option("steps")
    kept, held = numbers(line.option("kept")), numbers(line.option("held"))
    held_of, layers = numbers(line.option("held-of")), line.number("layers", 0)
    cut, microbatches = numbers(line.option("cut")), line.number("microbatches", 0)
    copies, takes_unlike = line.flag("copies"), line.flag("takes-unlike")
    min_stages = line.number("min-stages", 1)
    parts_due, parts_done = line.number("parts-due", 0), line.option("parts-done")
    return [
        ev.StatusReported(
            rank=rank,
            generation=generation,
            iteration=iteration,
            live=iteration is not None and not replaying,
            stages=stages or (() if holds else (rank,)),
            pipeline_known=known,
            dirty=dirty,
            holds=() if holds is None else (holds,),
            pipeline=pipeline,
            undoable=undoable,
            no_update=no_update,
            updated=updated,
            rounds=rounds,
            can_resend=can_resend,
            steps=None if steps is None else int(steps),
            log_gap_before=gap_before,
            log_gap_reason="the disk was full" if gap_before else "",
            kept=kept,
            held=held,
            held_of=held_of[0] if held_of else None,
            copies=copies,
            layers=layers,
            completes=completes,
            fresh=fresh,
            cut=cut,
            microbatches=microbatches,
            min_stages=min_stages,
            takes_unlike=takes_unlike,
            parts_due=parts_due,
            parts_done=None if parts_done is None else int(parts_done),
        )
        for rank in ranks
    ]


def _replay_failed(line: Line, state: State) -> list[ev.Event]:
    generation, at = _generation(line, state), line.option("differs-at")
    diverged = line.flag("diverged") or at is not None
    return [
        ev.ReplayFailed(
            rank=int(line.take()),
            generation=generation,
            reason=line.text("the replay diverged" if diverged else "its log is torn"),
            diverged=diverged,
            differs_at=None if at is None else int(at),
        )
    ]


def _plan_change(line: Line, state: State) -> list[ev.Event]:
    world, plan = line.number("world", state.worlds.planned + 1), _plan(line.option("plan") or "")
    command = tuple((line.option("command") or "").split())
    words = line.rest()
    machines, reasons = tuple(w for w in words if " " not in w), [w for w in words if " " in w]
    reason = reasons[0] if reasons else ""
    return [
        ev.ChangePlanned(
            world=world,
            machines=machines,
            command=command,
            plan=plan,
            reason=reason,
            asked_by="an operator",
        )
    ]


def _plan(word: str) -> str:
    """A plan as it is, or one of cuts and microbatches: ``cuts:3,3@6/2,2,2@10``."""
    if not word.startswith("cuts:"):
        return word
    pipelines = []
    for pipeline in word.removeprefix("cuts:").split("/"):
        cut, _, microbatches = pipeline.partition("@")
        pipelines.append(PlannedPipeline(numbers(cut), int(microbatches or 0)))
    return RunPlan(tuple(pipelines)).to_text()


def _offered(line: Line, state: State) -> list[ev.Event]:
    holder = numbers(line.option("from"))
    ranks, generation = ranks_of(state, line.take()), _generation(line, state)
    line.skip("at")
    at = int(line.take())
    return [
        ev.StateOffered(
            rank=rank,
            generation=generation,
            iteration=at,
            address=f"host-{rank}:1",
            digest="d",
            holder=holder[0] if holder else None,
        )
        for rank in ranks
    ]


def _differed(line: Line, state: State) -> list[ev.Event]:
    word, generation = line.take(), _generation(line, state)
    ranks = [] if word == NOTHING else ranks_of(state, word)
    line.skip("at")
    iteration, right = int(line.take()), line.flag("right")
    return [
        ev.StepDiffered(
            generation=generation,
            iteration=iteration,
            ranks=tuple(ranks),
            kind=line.text("once"),
            tensors="a message",
            right=right,
        )
    ]


def _audits(line: Line, _: State) -> list[ev.Event]:
    machine, slot = line.take(), int(line.take())
    begin, until = map(int, line.take().split(".."))
    return [ev.AuditBegun(machine=machine, slot=slot, begin=begin, until=until)]


def _audited(line: Line, _: State) -> list[ev.Event]:
    machine, slot = line.take(), int(line.take())
    begin, until = map(int, line.take().split(".."))
    at, digest, changed = line.option("at"), line.option("digest") or "", line.flag("changed")
    slots, rank = numbers(line.option("slots")), line.number("rank", slot)
    then = line.option("then") or ""
    return [
        ev.AuditEnded(
            machine=machine,
            slot=slot,
            begin=begin,
            until=until,
            slots=slots,
            rank=rank,
            iteration=None if at is None else int(at),
            tensors="" if at is None else "a message",
            digest=digest,
            changed=changed,
            problem=line.text(),
            on_corruption=then,
        )
    ]


def _exited(line: Line, state: State) -> list[ev.Event]:
    given, rank, at = line.option("started_in"), line.option("rank"), line.option("at")
    return [
        ev.ScriptExited(
            machine=m,
            started_in=started_in_of(state, m) if given is None else int(given),
            rank=None if rank is None else int(rank),
            iteration=None if at is None else int(at),
        )
        for m in line.rest()
    ]


def _script_failed(line: Line, state: State) -> list[ev.Event]:
    machine, code = line.take(), line.number("code", 1)
    usage, differs, alike = (line.flag(name) for name in ("usage", "differs", "alike"))
    started_in = line.number("started_in", started_in_of(state, machine))
    iteration = number_or_none(line.option("after") or NOTHING)
    cause = line.option("cause") or ""
    reason = line.text("ValueError")
    return [
        ev.ScriptFailed(
            machine=machine,
            started_in=started_in,
            reason=reason,
            exit_code=code,
            usage=usage or differs or alike,
            differs=differs,
            alike=alike,
            iteration=iteration,
            cause=cause,
        )
    ]


def _deadline_passed(line: Line, state: State) -> list[ev.Event]:
    generation, phase = _generation(line, state), line.option("phase") or state.phase.value
    words = line.rest()
    machines = tuple(w for w in words if " " not in w)
    reasons = [w for w in words if " " in w]
    reason = reasons[0] if reasons else "no answer"
    return [ev.DeadlinePassed(generation=generation, phase=phase, machines=machines, reason=reason)]


def _event(line: Line, _: State) -> list[ev.Event]:
    return [event_from_dict(json.loads(line.take()))]


def line_of(event: ev.Event) -> str:
    """The line of any event, as the journal has it: shorter words for it are a person's."""
    return f"event {shlex.quote(json.dumps(event_to_dict(event)))}"


def _generation(line: Line, state: State) -> int:
    return line.number("gen", state.generation)


def _said(
    event: Callable[..., ev.Event], words: str, text: str | None = None, **fixed: object
) -> Callable[[Line, State], list[ev.Event]]:
    """A reader of lines whose words are fields of an event, in this order: one event for each rank.

    Args:
        event: its class.
        words: names of :data:`_FIELDS` and :data:`_RANKS`, and ``at``, which stands in the line as it is.
        text: the reason where the line ends without one; None if the event has none.
        fixed: fields that no line says.
    """

    def read(line: Line, state: State) -> list[ev.Event]:
        values, each = dict(fixed), [dict[str, int]()]
        for word in words.split():
            if word == "at":
                line.skip(word)
            elif word in _RANKS:
                each = [{"rank": rank} for rank in _RANKS[word](state, line.take())]
            else:
                values[word] = _FIELDS[word](line, state)
        if text is not None:
            values["reason"] = line.text(text)
        return [event(**values, **rank) for rank in each]

    return read


def _word(line: Line, _: State) -> str:
    return line.take()


def _number(line: Line, _: State) -> int:
    return int(line.take())


def _numbers(line: Line, _: State) -> tuple[int, ...]:
    return numbers(line.take())


_RANKS: dict[str, Callable[[State, str], list[int]]] = {"ranks": ranks_of, "next": next_ranks_of}
"""Workers that a word names: of the present world, and of the one that was planned last."""

_FIELDS: dict[str, Callable[[Line, State], object]] = {
    "machine": _word,
    "fault": _word,
    "iteration": _number,
    "permille": _number,
    "slots": _numbers,
    "layers": _numbers,
    "shares": _numbers,
    "generation": _generation,
    "epoch": lambda line, state: line.number("epoch", state.checkpoints.epoch),
    "world": lambda line, state: line.number("world", state.worlds.planned),
    "path": lambda line, _: line.option("path") or "part",
    "digest": lambda line, _: "" if line.flag("named") else "a digest",
    "keep": lambda line, _: line.number("keep", 1),
    "earlier": lambda line, _: numbers(line.option("earlier")),
    "ran_s": lambda line, _: line.number("ran", 0),
    "exit_code": lambda line, _: line.number("code", 1),
}
"""Readers of the fields of events, which a line says by its next word, or by an option."""

_READERS: dict[str, Callable[[Line, State], Sequence[ev.Event]]] = {
    "open": _open,
    "join": _join,
    "unhealthy": _said(ev.HealthCheckFailed, "machine", "a fan stands still"),
    "lost": _lost,
    "drain": _said(ev.DrainRequested, "machine", asked_by="an operator"),
    "declined": _said(ev.GuestDeclined, "machine", "too little memory"),
    "request-machines": _said(ev.MachinesRequested, "machine slots"),
    "came-back": _said(ev.WorkerCameBack, "machine ranks"),
    "sessionless": _said(ev.SessionlessWorkers, "machine generation ran_s"),
    "report": _report,
    "ready": _said(ev.WorkerReady, "ranks generation"),
    "replay-failed": _replay_failed,
    "damaged": _said(
        ev.CheckpointDamaged,
        "ranks generation at iteration",
        "the file __0_0.distcp does not match its digest",
    ),
    "communication-failed": _said(ev.CommunicationFailed, "ranks generation", "connection reset"),
    "persisted": _said(ev.PartPersisted, "digest ranks generation at iteration epoch path"),
    "committed": _said(ev.CheckpointCommitted, "iteration epoch keep earlier"),
    "request-checkpoint": _said(
        ev.CheckpointRequested, "ranks generation at iteration", "its log is nearly full"
    ),
    "request-layout": _said(ev.LayoutRequested, "ranks generation at iteration layers"),
    "request-shares": _said(ev.SharesRequested, "ranks generation at iteration shares"),
    "stopped": _said(ev.LayoutBoundaryReached, "ranks generation at iteration"),
    "layout-declined": _said(ev.LayoutDeclined, "ranks generation", "too little memory"),
    "plan-change": _plan_change,
    "prepared": _said(ev.NextPrepared, "next world"),
    "request-switch": _said(ev.SwitchRequested, "ranks generation at iteration world"),
    "offered": _offered,
    "taken": _said(ev.StateTaken, "next world"),
    "given-up": _said(ev.ChangeGivenUp, "world", "its script cannot be started"),
    "awaiting": _said(ev.GroupAwaited, "ranks generation"),
    "pace": _said(ev.PaceNoted, "ranks generation permille", iteration=30),
    "differed": _differed,
    "doubted": _said(
        ev.CheckpointsDoubted, "generation iteration", "machine 1 has computed iteration 29 wrong"
    ),
    "audits": _audits,
    "audited": _audited,
    "finished": _said(ev.WorkerFinished, "ranks generation"),
    "exited": _exited,
    "script-failed": _script_failed,
    "deadline-passed": _deadline_passed,
    "closed": _said(ev.JobClosed, "exit_code", "Ctrl-C"),
    "inject": _said(ev.FaultInjected, "fault"),
    "event": _event,
}
"""A reader for each kind of line."""
