"""The recovery protocol: a pure state machine. An event and a state make the next state.

All participants apply the same events in the same order (`coordination/journal.py`), so all of them hold the
same state. What one participant has to do follows from the state (`recovery/orders.py`) and is never sent. A
participant that joins late, or that was frozen for a minute, reads the journal and reaches the same state.

The table below is the protocol. An event that it does not list for the current phase changes nothing, and
neither does an event of an older generation: all but reports, which count until a plan is made of them. The
picture in `docs/protocol.md` is drawn from the table, and the tests hold the table against what the
simulation saw.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.handlers import (
    audits,
    checkpoints,
    guests,
    layouts,
    membership,
    pace,
    recovery,
    worlds,
)
from swift_ft.recovery.handlers.runs import NOTED_TOGETHER
from swift_ft.recovery.job_state import Phase, State

FORMING, AGREEING, RECOVERING, LIVE, ENDED = Phase
ANY = (FORMING, AGREEING, RECOVERING, LIVE)
STAY = None

# fmt: off
TABLE = (
    # in these phases          this event               leads to one of these phases
    ((FORMING,),               ev.JobOpened,            (STAY,)),
    ((FORMING,),               ev.MachineJoined,        (STAY, AGREEING)),   # the last empty slot is filled
    ((AGREEING, RECOVERING, LIVE), ev.MachineJoined,    (STAY,)),            # as a spare
    (ANY,                      ev.HealthCheckFailed,    (STAY,)),
    ((FORMING,),               ev.StatusReported,       (STAY,)),            # a late one
    ((AGREEING,),              ev.StatusReported,       (STAY, RECOVERING, LIVE, FORMING, ENDED)),  # the last
    ((AGREEING,),              ev.SessionlessWorkers,   (STAY, FORMING)),    # all processes start again
    ((RECOVERING,),            ev.WorkerReady,          (STAY, LIVE)),       # the last
    ((RECOVERING,),            ev.HelpDeclined,         (AGREEING,)),
    ((RECOVERING,),            ev.ReplayFailed,         (AGREEING, FORMING)),  # a strange machine goes
    ((LIVE,),                  ev.ReplayFailed,         (AGREEING, ENDED)),  # a script ended too early
    ((RECOVERING,),            ev.CheckpointDamaged,    (AGREEING, ENDED)),  # all of them are
    ((RECOVERING,),            ev.CommunicationFailed,  (AGREEING,)),
    ((LIVE,),                  ev.CommunicationFailed,  (AGREEING, ENDED)),  # or a script ended too early
    ((FORMING,),               ev.MachineLost,          (STAY, ENDED)),
    ((AGREEING, RECOVERING, LIVE), ev.MachineLost,      (STAY, FORMING, AGREEING, ENDED)),  # a spare
    (ANY,                      ev.WorkerCameBack,       (STAY,)),
    (ANY,                      ev.DrainRequested,       (STAY,)),            # then it is lost, on request
    (ANY,                      ev.GuestDeclined,        (STAY,)),
    (ANY,                      ev.MachinesRequested,    (STAY,)),
    ((AGREEING, RECOVERING),   ev.DeadlinePassed,       (FORMING, AGREEING, ENDED)),
    (ANY,                      ev.PartPersisted,        (STAY,)),
    (ANY,                      ev.CheckpointCommitted,  (STAY,)),
    ((LIVE,),                  ev.CheckpointRequested,  (STAY,)),
    ((LIVE,),                  ev.LayoutRequested,      (STAY,)),
    ((LIVE,),                  ev.SharesRequested,      (STAY,)),
    ((LIVE,),                  ev.LayoutBoundaryReached, (STAY, AGREEING)),  # the last
    ((RECOVERING,),            ev.LayoutDeclined,       (AGREEING,)),
    ((FORMING, LIVE),          ev.ChangePlanned,        (STAY,)),
    ((FORMING, LIVE),          ev.NextPrepared,         (STAY,)),
    ((LIVE,),                  ev.SwitchRequested,      (STAY,)),
    ((FORMING, LIVE),          ev.StateOffered,         (STAY,)),
    ((FORMING, LIVE),          ev.StateTaken,           (STAY, AGREEING)),   # the last: it is switched
    ((FORMING, LIVE),          ev.ChangeGivenUp,        (STAY,)),
    ((RECOVERING,),            ev.GroupAwaited,         (STAY,)),
    ((LIVE,),                  ev.PaceNoted,            (STAY,)),
    ((LIVE,),                  ev.StepDiffered,         (STAY,)),
    ((LIVE,),                  ev.AuditBegun,           (STAY,)),
    ((LIVE,),                  ev.AuditEnded,           (STAY,)),
    ((LIVE,),                  ev.CheckpointsDoubted,   (AGREEING, ENDED)),  # or a script has
    ((LIVE,),                  ev.WorkerFinished,       (STAY,)),
    ((FORMING, AGREEING, LIVE), ev.ScriptExited,        (STAY, ENDED)),      # the last one, or too early
    ((RECOVERING,),            ev.ScriptExited,         (ENDED,)),           # all others need it
    ((FORMING,),               ev.ScriptFailed,         (STAY, ENDED)),
    ((AGREEING, LIVE),         ev.ScriptFailed,         (FORMING, AGREEING, ENDED)),  # all start again
    ((RECOVERING,),            ev.ScriptFailed,         (FORMING, AGREEING, ENDED)),
    (ANY,                      ev.FaultInjected,        (STAY,)),
    (ANY,                      ev.JobClosed,            (ENDED,)),
)
# fmt: on

TRANSITIONS: Mapping[tuple[Phase, type[ev.Event]], frozenset[Phase]] = {
    (phase, event): frozenset(phase if following is STAY else following for following in next_phases)
    for phases, event, next_phases in TABLE
    for phase in phases
}
"""By phase and event: the phases in which the job may be afterwards."""

_HANDLERS: Mapping[type[Any], Callable[[State, Any], State]] = {
    ev.JobOpened: membership.job_opened,
    ev.MachineJoined: membership.machine_joined,
    ev.HealthCheckFailed: membership.health_check_failed,
    ev.MachineLost: membership.machine_lost,
    ev.WorkerCameBack: membership.worker_came_back,
    ev.DrainRequested: membership.drain_requested,
    ev.GuestDeclined: guests.guest_declined,
    ev.MachinesRequested: guests.machines_requested,
    ev.SessionlessWorkers: membership.sessionless_workers,
    ev.StatusReported: recovery.status_reported,
    ev.WorkerReady: recovery.worker_ready,
    ev.ReplayFailed: recovery.replay_failed,
    ev.HelpDeclined: recovery.help_declined,
    ev.CommunicationFailed: recovery.communication_failed,
    ev.PartPersisted: checkpoints.part_persisted,
    ev.CheckpointCommitted: checkpoints.checkpoint_committed,
    ev.CheckpointDamaged: checkpoints.checkpoint_damaged,
    ev.CheckpointRequested: checkpoints.checkpoint_requested,
    ev.LayoutRequested: layouts.layout_requested,
    ev.SharesRequested: layouts.shares_requested,
    ev.LayoutBoundaryReached: layouts.layout_boundary_reached,
    ev.LayoutDeclined: layouts.layout_declined,
    ev.ChangePlanned: worlds.change_planned,
    ev.NextPrepared: worlds.next_prepared,
    ev.SwitchRequested: worlds.switch_requested,
    ev.StateOffered: worlds.state_offered,
    ev.StateTaken: worlds.state_taken,
    ev.ChangeGivenUp: worlds.change_given_up,
    ev.GroupAwaited: recovery.group_awaited,
    ev.PaceNoted: pace.pace_noted,
    ev.StepDiffered: membership.step_differed,
    ev.AuditBegun: audits.audit_begun,
    ev.AuditEnded: audits.audit_ended,
    ev.CheckpointsDoubted: audits.checkpoints_doubted,
    ev.WorkerFinished: recovery.worker_finished,
    ev.ScriptExited: membership.script_exited,
    ev.ScriptFailed: membership.script_failed,
    ev.DeadlinePassed: membership.deadline_passed,
    ev.JobClosed: membership.job_closed,
    ev.FaultInjected: membership.fault_injected,
}


def step(state: State, event: ev.Event) -> State:
    """Apply one event. The state itself comes back if the event changes nothing."""
    kind = type(event)
    if (state.phase, kind) not in TRANSITIONS:
        return state
    if kind in ev.OF_A_GENERATION and event.generation != state.generation:  # type: ignore[union-attr]  # they have one
        return state
    state = _HANDLERS[kind](state, event)
    return audits.settled(state) if state.phase == Phase.ENDED else state


def step_all(state: State, events: Iterable[ev.Event]) -> State:
    """Apply events one after the other: what :func:`step` would make of them, at a fraction of its cost."""
    for kind, neighbours in itertools.groupby(events, key=type):
        run, done = list(neighbours), 0
        if kind in NOTED_TOGETHER and (state.phase, kind) in TRANSITIONS:
            state, done = NOTED_TOGETHER[kind](state, run)
        for event in run[done:]:
            state = step(state, event)
    return state
