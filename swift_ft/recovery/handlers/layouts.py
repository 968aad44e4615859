"""Layouts: layers that are redistributed among the stages, or batches among replicas, between two iterations.

    requested ──▶ all stop at one iteration ──▶ layers move ──▶ all are ready: the new layout counts
                            └─────── a loss ──────┴──▶ the old layout, as if nothing had been asked

What moves is kept aside until all are ready. So no worker ever has a part of each layout. Where batches are
dealt again nothing moves: once all have stopped, none has begun the iteration from which it counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.handlers.generations import open_generation
from swift_ft.recovery.job_state import Layouts, PendingLayout, Shares, State
from swift_ft.recovery.layout.stage_layers import (
    StageLayers,
    layers_by_rank,
    pipelines_in,
    present_layout,
    stages_in,
    why_no_layout,
)
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.recovery.values import replace


def layout_requested(state: State, event: ev.LayoutRequested) -> State:
    """Accept a request, if there is none, and the layout is another one that can be."""
    # A declined layout would fail again, for want of memory say, and stop all workers each time.
    if _other_change(state) or event.layers in state.layouts.declined:
        return state
    statuses = state.round.statuses
    report = statuses[event.rank]
    present = present_layout(statuses, state.layouts.current)
    if too_late(state, event) or event.layers == present:
        return state
    if why_no_layout(event.layers, report.layers, stages_in(statuses)):
        return state
    pending = PendingLayout(event.iteration, event.layers)
    return replace(state, layouts=replace(state.layouts, pending=pending))


def shares_requested(state: State, event: ev.SharesRequested) -> State:
    """Accept a request, if there is none, and the shares are others, of as large a batch."""
    shares, before = event.shares, state.layouts.shares
    if _other_change(state) or too_late(state, event):
        return state
    if min(shares, default=0) < 1 or state.world_size % len(shares):
        return state
    # A global batch of another size would be another training.
    if before and (len(shares), sum(shares)) != (len(before[-1].samples), sum(before[-1].samples)):
        return state
    if before and shares == before[-1].samples:
        return state
    pending = PendingLayout(event.iteration, shares=shares)
    return replace(state, layouts=replace(state.layouts, pending=pending))


def _other_change(state: State) -> bool:
    """Whether all are about to stop anyway: one change comes after the other."""
    # A generation that moves layers would end the change to the next world, which has been prepared for long.
    return state.layouts.pending is not None or state.worlds.change is not None


def too_late(state: State, event: ev.LayoutRequested | ev.SharesRequested | ev.SwitchRequested) -> bool:
    """Whether the run ends before all could stop."""
    steps = state.round.statuses[event.rank].steps
    # A worker that is done with its loop never comes to the iteration at which all stop.
    return bool(state.round.finished) or (steps is not None and event.iteration >= steps)


def layout_boundary_reached(state: State, event: ev.LayoutBoundaryReached) -> State:
    """Note that a worker has stopped. Once all have, they report in a new generation.

    Its plan moves layers. Shares count at once.
    """
    pending = state.layouts.pending
    if pending is None or pending.world or pending.iteration != event.iteration:
        return state
    stopped = state.round.stopped.set(event.rank, None)
    if len(stopped) < state.world_size:
        return replace(state, round=replace(state.round, stopped=stopped))
    opened = open_generation(state)
    if pending.shares:
        return replace(opened, layouts=_dealt(opened.layouts, pending))
    # open_generation() has dropped the move, and this generation is there for it.
    return replace(opened, layouts=replace(opened.layouts, pending=pending))


def _dealt(layouts: Layouts, pending: PendingLayout) -> Layouts:
    """The layouts once batches are dealt as was asked for. What was to be after that is abandoned."""
    earlier = tuple(shares for shares in layouts.shares if shares.since < pending.iteration)
    return replace(layouts, shares=(*earlier, Shares(pending.iteration, pending.shares)))


def layout_declined(state: State, event: ev.LayoutDeclined) -> State:
    """Go on in the old layout, and do not ask for this one again."""
    declined = state.layouts.declined
    if state.plan is not None and state.plan.new_layout is not None:
        declined |= {state.plan.new_layout}
    return open_generation(replace(state, layouts=replace(state.layouts, declined=declined)))


def with_new_layout(state: State, plan: Plan, statuses: Mapping[int, ev.StatusReported]) -> Plan:
    """The plan that also moves layers, if all have kept their state and stand where they were to stop."""
    pending = state.layouts.pending
    # Recovering and moving at once would mix two kinds of inconsistent states (decision 15).
    if pending is None or plan.mode != RecoveryMode.CONTINUE or plan.resume != pending.iteration:
        return plan
    if any(status.iteration != pending.iteration for status in statuses.values()):
        return plan
    return replace(plan, mode=RecoveryMode.LAYOUT, new_layout=pending.layers, warm_up=True)


def placed(layouts: Layouts, statuses: Mapping[int, ev.StatusReported], current: StageLayers) -> Layouts:
    """Note where the layers are, now that all workers have reported: in a later round they may not have."""
    present = present_layout(statuses, current)
    placed_now, pipelines = Map(layers_by_rank(statuses, current)), tuple(pipelines_in(statuses))
    several = len(pipelines) > 1 and bool(placed_now)
    return replace(layouts, present=present, placed=placed_now, pipelines=pipelines if several else ())


def in_layout(layouts: Layouts, layers: StageLayers, since: int) -> Layouts:
    """The layouts once the new one counts."""
    return replace(layouts, current=layers, pending=None, since=since, changes=layouts.changes + 1)
