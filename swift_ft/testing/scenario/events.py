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
        )
    ]


def _join(line: Line, _: State) -> list[ev.Event]:
    slot = line.option("slot")
    preferred = None if slot is None else int(slot)
    setup, host, identity = _setup(line), line.option("on") or "", line.option("identity") or ""
    return [
        ev.MachineJoined(
            machine=m,
            preferred_slot=preferred,
            address=f"{m}:1",
            setup=setup,
            host=host,
            identity=identity,
        )
        for m in line.rest()
    ]


def _setup(line: Line) -> tuple[str, ...]:
    torch = line.option("torch")
    return () if torch is None else (f"torch: {torch}",)


def _unhealthy(line: Line, _: State) -> list[ev.Event]:
    return [ev.HealthCheckFailed(machine=line.take(), reason=line.text("a fan stands still"))]


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


def _drain(line: Line, _: State) -> list[ev.Event]:
    return [ev.DrainRequested(machine=line.take(), asked_by="an operator")]


def _declined(line: Line, _: State) -> list[ev.Event]:
    return [ev.GuestDeclined(machine=line.take(), reason=line.text("too little memory"))]


def _request_machines(line: Line, _: State) -> list[ev.Event]:
    return [ev.MachinesRequested(machine=line.take(), slots=numbers(line.take()))]


def _came_back(line: Line, _: State) -> list[ev.Event]:
    return [ev.WorkerCameBack(machine=line.take(), rank=int(line.take()))]


def _sessionless(line: Line, state: State) -> list[ev.Event]:
    ran_s, generation = line.number("ran", 0), _generation(line, state)
    return [ev.SessionlessWorkers(machine=line.take(), generation=generation, ran_s=ran_s)]


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
        )
        for rank in ranks
    ]


def _ready(line: Line, state: State) -> list[ev.Event]:
    generation = _generation(line, state)
    return [ev.WorkerReady(rank=rank, generation=generation) for rank in ranks_of(state, line.take())]


def _replay_failed(line: Line, state: State) -> list[ev.Event]:
    generation, doubts, at = _generation(line, state), line.option("doubts"), line.option("differs-at")
    diverged = line.flag("diverged") or doubts is not None or at is not None
    return [
        ev.ReplayFailed(
            rank=int(line.take()),
            generation=generation,
            reason=line.text("the replay diverged" if diverged else "its log is torn"),
            diverged=diverged,
            differs_at=None if at is None else int(at),
            doubts=None if doubts is None else int(doubts),
        )
    ]


def _damaged(line: Line, state: State) -> list[ev.Event]:
    generation, rank = _generation(line, state), int(line.take())
    line.skip("at")
    iteration = int(line.take())
    reason = line.text("the file __0_0.distcp does not match its digest")
    return [ev.CheckpointDamaged(rank=rank, generation=generation, iteration=iteration, reason=reason)]


def _communication_failed(line: Line, state: State) -> list[ev.Event]:
    generation, rank = _generation(line, state), int(line.take())
    return [ev.CommunicationFailed(rank=rank, generation=generation, reason=line.text("connection reset"))]


def _persisted(line: Line, state: State) -> list[ev.Event]:
    ranks, epoch = ranks_of(state, line.take()), line.number("epoch", state.checkpoints.epoch)
    generation, path = _generation(line, state), line.option("path") or "part"
    line.skip("at")
    iteration = int(line.take())
    return [
        ev.PartPersisted(rank=rank, iteration=iteration, epoch=epoch, generation=generation, path=path)
        for rank in ranks
    ]


def _committed(line: Line, state: State) -> list[ev.Event]:
    return [
        ev.CheckpointCommitted(
            iteration=int(line.take()),
            epoch=line.number("epoch", state.checkpoints.epoch),
            keep=line.number("keep", 1),
            earlier=numbers(line.option("earlier")),
        )
    ]


def _request_checkpoint(line: Line, state: State) -> list[ev.Event]:
    rank, generation = int(line.take()), _generation(line, state)
    line.skip("at")
    iteration = int(line.take())
    reason = line.text("its log is nearly full")
    return [ev.CheckpointRequested(rank=rank, iteration=iteration, generation=generation, reason=reason)]


def _request_layout(line: Line, state: State) -> list[ev.Event]:
    rank, generation = int(line.take()), _generation(line, state)
    line.skip("at")
    iteration = int(line.take())
    layers = numbers(line.take())
    return [ev.LayoutRequested(rank=rank, generation=generation, iteration=iteration, layers=layers)]


def _request_shares(line: Line, state: State) -> list[ev.Event]:
    rank, generation = int(line.take()), _generation(line, state)
    line.skip("at")
    iteration = int(line.take())
    shares = numbers(line.take())
    return [ev.SharesRequested(rank=rank, generation=generation, iteration=iteration, shares=shares)]


def _stopped(line: Line, state: State) -> list[ev.Event]:
    ranks, generation = ranks_of(state, line.take()), _generation(line, state)
    line.skip("at")
    at = int(line.take())
    return [ev.LayoutBoundaryReached(rank=rank, generation=generation, iteration=at) for rank in ranks]


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


def _prepared(line: Line, state: State) -> list[ev.Event]:
    world = line.number("world", state.worlds.planned)
    return [ev.NextPrepared(rank=rank, world=world) for rank in next_ranks_of(state, line.take())]


def _request_switch(line: Line, state: State) -> list[ev.Event]:
    rank, generation = int(line.take()), _generation(line, state)
    world = line.number("world", state.worlds.planned)
    line.skip("at")
    iteration = int(line.take())
    return [ev.SwitchRequested(rank=rank, generation=generation, iteration=iteration, world=world)]


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


def _taken(line: Line, state: State) -> list[ev.Event]:
    world = line.number("world", state.worlds.planned)
    return [ev.StateTaken(rank=rank, world=world) for rank in next_ranks_of(state, line.take())]


def _given_up(line: Line, state: State) -> list[ev.Event]:
    world = line.number("world", state.worlds.planned)
    return [ev.ChangeGivenUp(world=world, reason=line.text("its script cannot be started"))]


def _awaiting(line: Line, state: State) -> list[ev.Event]:
    ranks, generation = ranks_of(state, line.take()), _generation(line, state)
    return [ev.GroupAwaited(rank=rank, generation=generation) for rank in ranks]


def _layout_declined(line: Line, state: State) -> list[ev.Event]:
    rank, generation = int(line.take()), _generation(line, state)
    return [ev.LayoutDeclined(rank=rank, generation=generation, reason=line.text("too little memory"))]


def _pace(line: Line, state: State) -> list[ev.Event]:
    rank, generation = int(line.take()), _generation(line, state)
    permille = int(line.take())
    return [ev.PaceNoted(rank=rank, generation=generation, iteration=30, permille=permille)]


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


def _doubted(line: Line, state: State) -> list[ev.Event]:
    generation, iteration = _generation(line, state), int(line.take())
    reason = line.text("machine 1 has computed iteration 29 wrong")
    return [ev.CheckpointsDoubted(generation=generation, iteration=iteration, reason=reason)]


def _audits(line: Line, _: State) -> list[ev.Event]:
    machine, slot = line.take(), int(line.take())
    begin, until = map(int, line.take().split(".."))
    return [ev.AuditBegun(machine=machine, slot=slot, begin=begin, until=until)]


def _audited(line: Line, _: State) -> list[ev.Event]:
    machine, slot = line.take(), int(line.take())
    begin, until = map(int, line.take().split(".."))
    at, digest, changed = line.option("at"), line.option("digest") or "", line.flag("changed")
    slots, rank = numbers(line.option("slots")), line.number("rank", slot)
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
        )
    ]


def _finished(line: Line, state: State) -> list[ev.Event]:
    generation = _generation(line, state)
    return [ev.WorkerFinished(rank=rank, generation=generation) for rank in ranks_of(state, line.take())]


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


def _closed(line: Line, _: State) -> list[ev.Event]:
    code = line.number("code", 1)
    return [ev.JobClosed(reason=line.text("Ctrl-C"), exit_code=code)]


def _inject(line: Line, _: State) -> list[ev.Event]:
    return [ev.FaultInjected(fault=line.take())]


def _event(line: Line, _: State) -> list[ev.Event]:
    return [event_from_dict(json.loads(line.take()))]


def line_of(event: ev.Event) -> str:
    """The line of any event, as the journal has it: shorter words for it are a person's."""
    return f"event {shlex.quote(json.dumps(event_to_dict(event)))}"


def _generation(line: Line, state: State) -> int:
    return line.number("gen", state.generation)


_READERS: dict[str, Callable[[Line, State], Sequence[ev.Event]]] = {
    "open": _open,
    "declined": _declined,
    "request-machines": _request_machines,
    "join": _join,
    "unhealthy": _unhealthy,
    "lost": _lost,
    "came-back": _came_back,
    "drain": _drain,
    "sessionless": _sessionless,
    "report": _report,
    "ready": _ready,
    "replay-failed": _replay_failed,
    "damaged": _damaged,
    "communication-failed": _communication_failed,
    "persisted": _persisted,
    "committed": _committed,
    "request-checkpoint": _request_checkpoint,
    "request-layout": _request_layout,
    "request-shares": _request_shares,
    "stopped": _stopped,
    "plan-change": _plan_change,
    "prepared": _prepared,
    "request-switch": _request_switch,
    "offered": _offered,
    "taken": _taken,
    "given-up": _given_up,
    "awaiting": _awaiting,
    "layout-declined": _layout_declined,
    "pace": _pace,
    "finished": _finished,
    "exited": _exited,
    "script-failed": _script_failed,
    "deadline-passed": _deadline_passed,
    "closed": _closed,
    "inject": _inject,
    "event": _event,
    "differed": _differed,
    "doubted": _doubted,
    "audits": _audits,
    "audited": _audited,
}
