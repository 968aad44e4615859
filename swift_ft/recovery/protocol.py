"""The recovery protocol: a pure state machine. Event in, new state out; orders follow from the state.

There is no I/O here, no clock, no thread. All participants apply the same events in the same order
(`recovery/journal.py`), so all hold the same state, and nobody has to be asked. What one participant has to
do is derived from the state (`recovery/orders.py`) instead of being sent along with an
event: whoever joins late, or reads an event twice, still does the right thing, and once only.

    FORMING ──all slots filled──▶ AGREEING ──everybody reported──▶ RECOVERING ──everybody ready──▶ LIVE
       ▲                              │                                │                            │
       └───────────── a member is lost, from any phase ◀───────────────┴────────────────────────────┘

The generation grows by one each time AGREEING begins. ENDED is final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State, Verdict
from swift_ft.recovery.ladder import groups_by_part
from swift_ft.recovery.plan import Plan, Way, make_plan

__all__ = ["step"]

MAX_INTERRUPTIONS = 3
"""Broken communication without a death, in a row and without progress, before the job stops."""

MAX_FAILED_FALLBACKS = 3
"""Ways back from a checkpoint that failed themselves, without a commit in between, before the job stops."""


def step(state: State, event: ev.Event) -> State:
    """Apply one event.

    Events of an older generation, of fenced machines and after the end change nothing: late news is no news.
    """
    if state.phase == Phase.ENDED:
        return state
    handler = _HANDLERS[type(event)]
    return handler(state, event)


def _opened(state: State, event: ev.Opened) -> State:
    if state.machines:
        return state
    return replace(
        state,
        machines=event.machines,
        workers=event.workers,
        restarts_left=event.restarts,
        max_failures=event.max_failures,
        committed=event.checkpoint,
        members=(None,) * event.machines,
        launched=(0,) * event.machines,
    )


def _joined(state: State, event: ev.Joined) -> State:
    known = {m for m, _ in state.spares} | set(state.members) | state.fenced
    if event.machine in known:
        return state
    spares = (*state.spares, (event.machine, event.preferred_slot))
    return _fill(replace(state, spares=spares, addresses={**state.addresses, event.machine: event.address}))


def _fill(state: State) -> State:
    """Fill all empty slots at once, as soon as there are machines for all of them."""
    holes = [slot for slot, member in enumerate(state.members) if member is None]
    if state.phase != Phase.FORMING or not holes or len(state.spares) < len(holes):
        return state
    members, spares = list(state.members), list(state.spares)
    for slot in holes:
        choice = next((s for s in spares if s[1] == slot), None)
        if choice is None:
            choice = next((s for s in spares if s[1] not in holes), spares[0])
        spares.remove(choice)
        members[slot] = choice[0]
    fresh = list(range(state.machines)) if state.restart_all else holes
    return _open_generation(replace(state, members=tuple(members), spares=tuple(spares)), fresh)


def _open_generation(state: State, fresh: list[int]) -> State:
    generation = state.generation + 1
    launched = tuple(generation if slot in fresh else old for slot, old in enumerate(state.launched))
    return replace(
        state,
        phase=Phase.AGREEING,
        generation=generation,
        launched=launched,
        reports={},
        bare=frozenset(),
        ready=frozenset(),
        finished=frozenset(),
        wanted=None,
        restart_all=False,
        plan=None,
    )


def _lost(state: State, event: ev.Lost) -> State:
    if event.reporter in state.fenced:
        return state
    slot = state.slot_of(event.machine)
    state = replace(
        state,
        fenced=state.fenced | {event.machine},
        addresses={m: a for m, a in state.addresses.items() if m != event.machine},
        spares=tuple(s for s in state.spares if s[0] != event.machine),
    )
    if slot is None or slot in state.exited:
        return state
    failures = state.failures + 1
    if state.max_failures is not None and failures > state.max_failures:
        return _end(
            state,
            f"{failures} machines were lost since the last checkpoint, "
            f"more than the limit of {state.max_failures} (the last one: {event.reason})",
        )
    if state.exited or len(state.finished) == state.world:
        return _end(state, f"machine {event.machine} was lost after the last iteration: {event.reason}")
    members = tuple(None if m == event.machine else m for m in state.members)
    return _fill(replace(state, members=members, failures=failures, phase=Phase.FORMING, plan=None))


def _bare(state: State, event: ev.Bare) -> State:
    slot = state.slot_of(event.machine)
    if slot is None or event.generation != state.generation or state.phase != Phase.AGREEING:
        return state
    if state.sessions:
        return state  # it has not come to its session yet
    return _try_plan(replace(state, bare=state.bare | {slot}))


def _reported(state: State, event: ev.Reported) -> State:
    if event.generation != state.generation or state.phase != Phase.AGREEING:
        return state
    if event.live and (event.iteration or 0) < state.rebuilding.get(event.rank, 0):
        event = replace(event, live=False)  # its replay was broken off, however long ago
    return _try_plan(replace(state, sessions=True, reports={**state.reports, event.rank: event}))


def _try_plan(state: State) -> State:
    if state.bare:  # one worker without a session is enough: all start again, as under torchrun
        return _restart(state, "the script has no session")
    if len(state.reports) < state.world:
        return state
    plan = make_plan(
        state.reports,
        workers=state.workers,
        committed=state.committed,
        must_fall_back=state.must_fall_back,
        unaided=state.unaided is not None,
        restored=state.restored,
    )
    if plan.way == Way.RESTART:
        return _restart(state, plan.reason)
    if plan.way == Way.START and state.committed is None and _began_apart(state):
        return _restart(state, "replicas that were started one after the other have begun from other values")
    if plan.way in (Way.START, Way.FALLBACK):
        state = replace(state, epoch=state.epoch + 1, durable={}, taken_back={}, log_since=state.generation)
        state = replace(state, restored={})
    else:
        stands_for = _stands_for(state, plan)
        taken_back = {**state.taken_back, **dict.fromkeys(_taken_back(state, stands_for), state.generation)}
        state = replace(state, durable=_parts_kept(state.durable, stands_for), taken_back=taken_back)
        state = replace(state, restored=_restored(state, plan))
    if plan.resume > state.resumed:
        state = replace(state, interruptions=min(state.interruptions, 1))  # the one that led here
    replays = {r: t.replay_until for r, t in plan.tasks.items() if t.begin < t.replay_until}
    state = replace(state, resumed=plan.resume, rebuilding=replays)
    helpers = {rank for shared in plan.shared for rank in shared.helpers}
    idle = frozenset(rank for rank, task in plan.tasks.items() if task.idle and rank not in helpers)
    state = replace(state, plan=plan, phase=Phase.RECOVERING, ready=idle, must_fall_back=plan.reason or None)
    return _try_live(state)


def _began_apart(state: State) -> bool:
    """Replicas get equal values by being made together, or from a replica that has state; else they differ.

    One that was receiving state when its source died does not even have its own beginning any more.
    """
    launched: dict[tuple[str, ...], set[int]] = {}
    for rank, report in state.reports.items():
        if report.holds:
            launched.setdefault(report.holds, set()).add(state.launched[rank // state.workers])
    return any(len(generations) > 1 for generations in launched.values())


def _restored(state: State, plan: Plan) -> dict[int, int]:
    """By rank, before which iteration a log has gaps: a replica's state brings no log, a replay makes one."""
    replayed = {rank for rank, task in plan.tasks.items() if task.begin < task.replay_until}
    restored = {rank: at for rank, at in state.restored.items() if rank not in replayed}
    for transfer in plan.transfers:
        for rank in transfer.targets if transfer.parameters is None else ():
            report, at = state.reports[rank], plan.tasks[rank].begin
            if at > (state.committed or 0) and not (report.live and (report.iteration or 0) >= at):
                restored[rank] = at
    return restored


def _parts_kept(
    durable: Mapping[int, Mapping[int, str]], stands_for: Mapping[int, int]
) -> dict[int, dict[int, str]]:
    """Without parts of iterations that a worker does not stand for (:func:`_stands_for`), by rank."""
    return {
        iteration: {rank: path for rank, path in parts.items() if iteration <= stands_for[rank]}
        for iteration, parts in durable.items()
    }


def _stands_for(state: State, plan: Plan) -> dict[int, int]:
    """The last iteration whose part of a checkpoint counts, by rank: it will have completed that when live.

    With later ones of lost workers a checkpoint could be committed, and older logs deleted, while a
    replacement still stands before it; with those of workers that go back it could be of two histories.
    Replicas that replay save again: all but their keeper name a part that the keeper is about to write.
    """
    alone = {rank for group in groups_by_part(state.reports) if len(group) == 1 for rank in group}
    return {rank: task.end if rank in alone else task.begin for rank, task in plan.tasks.items()}


def _taken_back(state: State, stands_for: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Iterations, with ranks, that survivors do not stand for any more: their parts may still come."""
    for rank, report in state.reports.items():
        for iteration in range(stands_for[rank] + 1, (report.iteration or 0) + 1):
            yield iteration, rank


def _try_live(state: State) -> State:
    if len(state.ready) < state.world:
        return state
    return replace(state, phase=Phase.LIVE, must_fall_back=None, unaided=None, rebuilding={})


def _restart(state: State, reason: str) -> State:
    """Start all processes again, at once or when the empty slots are filled; their plan will say why."""
    members = tuple(None if m in state.fenced else m for m in state.members)  # some left after their end
    state = replace(state, members=members, must_fall_back=reason, durable={}, exited=frozenset(), plan=None)
    if None in state.members:
        return _fill(replace(state, restart_all=True, phase=Phase.FORMING))
    return _open_generation(state, fresh=list(range(state.machines)))


def _ready(state: State, event: ev.Ready) -> State:
    if event.generation != state.generation or state.phase != Phase.RECOVERING:
        return state
    return _try_live(replace(state, ready=state.ready | {event.rank}))


def _cannot_replay(state: State, event: ev.CannotReplay) -> State:
    if event.generation != state.generation or state.phase not in (Phase.RECOVERING, Phase.LIVE):
        return state
    why = f"worker {event.rank} cannot replay: {event.reason}"
    if state.plan is not None and state.plan.way in (Way.START, Way.FALLBACK):
        why = f"worker {event.rank} cannot go on from the checkpoint: {event.reason}"
        state = replace(state, failed_fallbacks=state.failed_fallbacks + 1)
        if state.failed_fallbacks > MAX_FAILED_FALLBACKS:
            return _end(state, f"{state.failed_fallbacks} ways back in a row failed: {why}")
    return _open_generation(replace(state, must_fall_back=why), fresh=[])


def _cannot_help(state: State, event: ev.CannotHelp) -> State:
    if event.generation != state.generation or state.phase != Phase.RECOVERING:
        return state
    unaided = f"worker {event.rank} cannot help: {event.reason}"
    return _open_generation(replace(state, unaided=unaided), fresh=[])


def _interrupted(state: State, event: ev.Interrupted) -> State:
    """While LIVE, or in RECOVERING: workers that replay jointly are connected, too."""
    if event.generation != state.generation or state.phase not in (Phase.LIVE, Phase.RECOVERING):
        return state
    interruptions = state.interruptions + 1
    if state.phase == Phase.RECOVERING and interruptions >= MAX_INTERRUPTIONS:
        why = f"a joint replay was broken off {interruptions} times in a row: {event.reason}"
        return _open_generation(replace(state, interruptions=interruptions, must_fall_back=why), fresh=[])
    if interruptions > MAX_INTERRUPTIONS:
        return _end(
            state,
            f"communication broke {interruptions} times in a row, and nobody was found dead: {event.reason}",
        )
    return _open_generation(replace(state, interruptions=interruptions), fresh=[])


def _durable(state: State, event: ev.Durable) -> State:
    stale = state.committed is not None and event.iteration <= state.committed
    valid_from = max(
        state.launched[event.rank // state.workers],
        state.taken_back.get((event.iteration, event.rank), 0),
    )
    if event.epoch != state.epoch or stale or event.generation < valid_from:
        return state
    parts = {**state.durable.get(event.iteration, {}), event.rank: event.path}
    return replace(state, durable={**state.durable, event.iteration: parts})


def _committed(state: State, event: ev.Committed) -> State:
    if event.epoch != state.epoch or (state.committed is not None and event.iteration <= state.committed):
        return state
    left = {i: parts for i, parts in state.durable.items() if i > event.iteration}
    taken_back = {at: g for at, g in state.taken_back.items() if at[0] > event.iteration}
    restored = {rank: at for rank, at in state.restored.items() if at > event.iteration}
    wanted = state.wanted if state.wanted is not None and state.wanted > event.iteration else None
    return replace(
        state,
        committed=event.iteration,
        wanted=wanted,
        durable=left,
        taken_back=taken_back,
        restored=restored,
        interruptions=0,
        failed_fallbacks=0,
        failures=0,
    )


def _checkpoint_wanted(state: State, event: ev.CheckpointWanted) -> State:
    """Take up a wish, unless another one is still ahead of somebody, who would not save for either then.

    What is wished is no promise: who learns of it too late has no part, and then it is never committed.
    """
    stale = state.committed is not None and event.iteration <= state.committed
    if event.generation != state.generation or state.phase != Phase.LIVE or stale:
        return state
    by_everybody = event.iteration - ev.WANTED_AHEAD - 1  # completed: by the asker at least one more
    if state.wanted is not None and state.wanted > by_everybody:
        return state
    return replace(state, wanted=event.iteration)


def _finished(state: State, event: ev.Finished) -> State:
    if event.generation != state.generation or state.phase != Phase.LIVE:
        return state
    return replace(state, finished=state.finished | {event.rank})


def _exited(state: State, event: ev.Exited) -> State:
    slot = state.slot_of(event.machine)
    if slot is None or state.launched[slot] != event.launched:
        return state
    exited = state.exited | {slot}
    if len(exited) == state.machines:
        verdict = Verdict(True, "finished")
        return replace(state, exited=exited, phase=Phase.ENDED, plan=None, verdict=verdict)
    if state.phase == Phase.LIVE:  # nobody has to wait for its last iteration
        state = replace(state, finished=state.finished | {*state.ranks_of(slot)})
    return replace(state, exited=exited)


def _failed(state: State, event: ev.Failed) -> State:
    slot = state.slot_of(event.machine)
    if slot is None or state.launched[slot] != event.launched:
        return state
    if not event.usage and _is_repairing(state, slot):
        return _restart(state, event.reason)  # most likely it stumbled over the loss that is being repaired
    if event.usage or state.restarts_left == 0:
        return _end(state, event.reason, event.exit_code)
    return _restart(replace(state, restarts_left=state.restarts_left - 1), event.reason)


def _is_repairing(state: State, slot: int) -> bool:
    """A generation has just ended, and the slot's workers, older than that, have not answered yet."""
    if state.phase == Phase.FORMING:
        return state.generation > 0
    return state.phase == Phase.AGREEING and state.launched[slot] < state.generation


def _timed_out(state: State, event: ev.TimedOut) -> State:
    if event.generation != state.generation or event.phase != state.phase:
        return state
    for machine in state.missing():  # by slot: in the same order for everybody who applies this
        if machine not in event.machines:
            continue
        if state.slot_of(machine) in state.exited:
            return _end(state, f"the script on machine {machine} ended before the others: {event.reason}")
        state = step(state, ev.Lost(machine, event.reason))
    return state


def _injected(state: State, event: ev.Injected) -> State:
    return replace(state, injected=state.injected | {event.fault})


def _closed(state: State, event: ev.Closed) -> State:
    return _end(state, event.reason, event.exit_code)


def _end(state: State, reason: str, exit_code: int = 1) -> State:
    return replace(state, phase=Phase.ENDED, plan=None, verdict=Verdict(False, reason, exit_code))


_HANDLERS: dict[type[Any], Callable[[State, Any], State]] = {
    ev.Opened: _opened,
    ev.Joined: _joined,
    ev.Lost: _lost,
    ev.Bare: _bare,
    ev.Reported: _reported,
    ev.Ready: _ready,
    ev.CannotReplay: _cannot_replay,
    ev.CannotHelp: _cannot_help,
    ev.Interrupted: _interrupted,
    ev.Durable: _durable,
    ev.Committed: _committed,
    ev.CheckpointWanted: _checkpoint_wanted,
    ev.Finished: _finished,
    ev.Exited: _exited,
    ev.Failed: _failed,
    ev.TimedOut: _timed_out,
    ev.Closed: _closed,
    ev.Injected: _injected,
}
