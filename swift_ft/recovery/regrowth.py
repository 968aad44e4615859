"""Back to the size that losses have taken from a job, once machines come for the lost ones. Pure.

    losses make the job smaller ──▶ its full size is noted: the machines of all slots, the layout
            ──▶ machines come and wait ──▶ a next world has them in the slots that were lost:
                  with the layout of before if all are filled, else with what would have followed
                  the loss of the others alone

Only losses are made good. Who changes the job to another size, or layout, on purpose, has it stay so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.next_pipelines import Sizes, pipelines_of, sizes_of
from swift_ft.recovery.survivors import alike, shares_of
from swift_ft.recovery.worlds import FullSize


class Growth(NamedTuple):
    """A larger world, which is nearer to the full size.

    Attributes:
        machines: by slot.
        pipelines: the number of stages of each; they are dealt to these machines in turn. Empty if the
            script makes them without a plan, or with the one that it had.
        plan: the one that it had, at its full size.
    """

    machines: tuple[str, ...]
    pipelines: tuple[int, ...] = ()
    plan: str = ""


def growth_of(state: State, most: int | None = None) -> Growth | None:
    """The larger world of the machines that are there; None if there is none, or it cannot be begun now.

    Args:
        most: machines that it may have.
    """
    full, membership = state.worlds.full, state.membership
    if full is None or state.phase != Phase.LIVE or state.worlds.change is not None:
        return None
    if state.layouts.pending is not None or state.round.finished or membership.ended:
        return None
    members = set(membership.slots)
    # A guest's slot is filled by a machine that comes, and one that was asked to leave, leaves first.
    if not membership.spares or members & {*membership.hosts, *membership.draining}:
        return None
    filled = _filled(state, full, len(full.machines) if most is None else min(most, len(full.machines)))
    if len(filled) == len(full.machines):
        return Growth(tuple(filled[slot] for slot in sorted(filled)), plan=full.plan)
    own = tuple(filled[slot] for slot in sorted(filled))
    formed = pipelines_of(state, full.pipelines, Sizes(full.layers, full.microbatches), filled)
    if formed is None:
        growth = Growth(alike(state, own, full.shares))
    else:
        growth = Growth(*formed.dealt(state.shape.workers_per_machine))
    return growth if len(growth.machines) > state.shape.machines else None


def missing_of(state: State) -> range:
    """The slots that losses have taken from a job: those of the full size behind those of the present one."""
    full = state.worlds.full
    return range(state.shape.machines, state.shape.machines if full is None else len(full.machines))


def full_size_after(state: State, machines: tuple[str, ...], plan: str) -> FullSize | None:
    """The size to which a job is to go back after a change that is planned; None if it is not to.

    Args:
        machines: by slot of the next world.
        plan: that was given for it; empty for none.
    """
    full = state.worlds.full
    if state.phase == Phase.FORMING:  # after a loss
        return full or _full_size(state)
    if full is None or (len(machines) == state.shape.machines and not plan):  # other machines, the script
        return full
    growth = growth_of(state, len(machines))
    grows_back = growth is not None and machines == growth.machines and len(machines) < len(full.machines)
    return full if grows_back else None


def _full_size(state: State) -> FullSize:
    members, pipelines = state.membership.members, state.layouts.pipelines
    sizes = sizes_of(state) if pipelines else Sizes(0, 0)
    machines = tuple(members.get(slot, "") for slot in range(state.shape.machines))
    return FullSize(machines, state.worlds.present.plan, shares_of(state), pipelines, *sizes)


def _filled(state: State, full: FullSize, most: int) -> dict[int, str]:
    """The machines in the slots of the full size: each in the one that it had, others where one is empty."""
    membership = state.membership
    there = [*membership.by_slot, *membership.own_spares()][:most]
    filled = {slot: machine for slot, machine in enumerate(full.machines) if machine in there}
    others: Iterator[str] = (machine for machine in there if machine not in full.machines)
    empty = (slot for slot in range(len(full.machines)) if slot not in filled)
    return filled | dict(zip(empty, others, strict=False))
