"""Machines that differ from the job: they are found before they are used, and refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.recovery import events as ev
from swift_ft.recovery.early_ends import why_steps_differ
from swift_ft.recovery.handlers.generations import end_job, fill_slots, vacate
from swift_ft.recovery.job_state import State
from swift_ft.recovery.requests import asked_again
from swift_ft.recovery.values import replace

MAX_STRANGERS = 1
"""The most machines in a row that may be refused because they compute something else. If a second one does,
it is the script that cannot repeat what it has done."""

_SEPARATOR = ": "
_MISSING = "not given"
_REMEDIES = (
    (
        ("the script", "the module"),
        "start it with the files that the job began with, or end the job and go on with --resume",
    ),
    (
        ("the script's ", "the variable "),
        "give it what the others have, or name it in --may-differ on all machines if it is meant to differ",
    ),
)
"""Remedies by the name of a difference, or by its beginning where that ends with a space."""

_OF_PROGRAM = ("the script", "the module", "the script's ")

_NUMBER = re.compile(r"\d+")


def why_refused(state: State, event: ev.MachineJoined) -> str:
    """The differences between a machine and the job, in one line. Empty if it may join."""
    jobs, own = _by_name(state.shape.setup), _by_name(event.setup)
    names = [name for name in dict.fromkeys((*jobs, *own)) if own.get(name) != jobs.get(name)]
    if state.worlds.present.has_own_program:  # whoever joins runs that, whatever it was started with
        names = [name for name in names if not _is_of(_OF_PROGRAM, name)]
    differences = [
        f"{name} is {own.get(name, _MISSING)} here and {jobs.get(name, _MISSING)} in the job"
        for name in names
    ]
    if not differences:
        return ""
    remedies = [remedy for of, remedy in _REMEDIES if any(_is_of(of, name) for name in names)]
    advice = f" ({'; '.join(remedies)})" if remedies else ""
    return f"this machine differs from the others of the job: {'; '.join(differences)}{advice}"


def _is_of(group: tuple[str, ...], name: str) -> bool:
    return any(name.startswith(one) if one.endswith(" ") else name == one for one in group)


def _by_name(setup: tuple[str, ...]) -> dict[str, str]:
    """The values by name: ``torch: 2.9.1`` is the value ``2.9.1`` of ``torch``."""
    return {name: value for name, _, value in (entry.partition(_SEPARATOR) for entry in setup)}


def refuse(state: State, machine: str, reason: str) -> State:
    """Refuse a machine for good. If it has a slot, the job waits for another one, and no loss is counted."""
    if machine not in state.membership.slots and machine not in state.membership.spares:
        state = asked_again(state, machine)
    membership = replace(state.membership, refused=state.membership.refused.set(machine, reason))
    if machine in membership.addresses:
        membership = replace(membership, addresses=membership.addresses.delete(machine))
    if machine in membership.spares:
        membership = replace(membership, spares=membership.spares.delete(machine))
    if machine not in membership.slots:
        return replace(state, membership=membership)
    return fill_slots(vacate(replace(state, membership=membership), machine))


def refuse_other_steps(state: State, statuses: Mapping[int, ev.StatusReported]) -> State | None:
    """All workers train for the same number of iterations. None if they do.

    A newcomer's machine is refused. Where workers differ that were started together, the job ends.
    """
    known = {rank: report for rank, report in statuses.items() if report.steps is not None}
    started_in = {rank: state.membership.started_in[state.slot_of_rank(rank)] for rank in known}
    # Those that were started first say what the job is.
    first = min(known, key=lambda rank: (started_in[rank], rank), default=None)
    other = next((rank for rank in known if known[rank].steps != known[first or 0].steps), None)
    if first is None or other is None:
        return None
    reason = why_steps_differ(known[first], known[other])
    # A worker that has trained with the others is not a stranger: the script itself is wrong.
    if started_in[first] == started_in[other] or started_in[other] < state.round.asked_in:
        return end_job(state, reason, EXIT_USAGE)
    return refuse(state, state.membership.members[state.slot_of_rank(other)], reason)


def is_newcomer(state: State, slot: int) -> bool:
    """Whether other workers were started before those of a slot. They may be lost by now."""
    started_in = state.membership.started_in
    return min(started_in.values()) < started_in[slot]


def refuse_strange_script(state: State, event: ev.ScriptFailed, slot: int) -> State | None:
    """Refuse a newcomer's machine whose script is used wrongly, where those of the others are not.

    Another program, another model, other data: that costs the machine, and the job goes on with the next one.
    None if the machine is not at fault: all workers were started together, another newcomer failed in the
    same way, or each would. What the job's program is, its first workers have said. Nor is a machine refused
    once training is complete: the others may be gone by now, and there is nothing left to replace it for.
    """
    if not event.usage or state.membership.ended or state.all_finished:
        return None
    # What the program is, the job's first workers have said: only later ones can differ from it.
    if event.differs:
        strange = state.membership.started_in[slot] > 1
    else:
        # A second machine with the same error shows that it is the script and not the machine.
        strange = is_newcomer(state, slot) and not event.alike and not _as_before(state, event.reason)
    if not strange:
        return None
    return refuse(state, state.membership.members[slot], event.reason)


def differs_from_the_start(state: State, event: ev.ReplayFailed) -> bool:
    """Whether a newcomer computes other bytes in the very first iteration after a checkpoint.

    It has loaded what was saved, and so it is its program that differs, or its data, or what surrounds it. A
    worker that was there before, and takes part in the replay, could be what differs instead.
    """
    plan, committed = state.plan, state.checkpoints.committed
    if plan is None or committed is None or event.differs_at != committed:
        return False
    together = plan.tasks[event.rank].replay_group or (event.rank,)
    return all(
        is_newcomer(state, state.slot_of_rank(rank)) and not state.round.statuses[rank].live
        for rank in together
    )


def refuse_stranger(state: State, event: ev.ReplayFailed) -> State:
    """Refuse the machine of a newcomer that differs. The next one replays; the others keep their state."""
    reason = (
        f"{event.reason}. That was the first iteration after a checkpoint: this machine runs another program "
        "than the one before it, or has other data or other variables in its environment"
    )
    state = replace(state, tries=replace(state.tries, strangers=state.tries.strangers + 1))
    return refuse(state, state.membership.members[state.slot_of_rank(event.rank)], reason)


def _as_before(state: State, reason: str) -> bool:
    """Whether a machine was refused for the same reason, whatever the numbers in it."""
    # Ranks and sizes in a message differ between machines that fail alike.
    same = _NUMBER.sub("", reason)
    return any(_NUMBER.sub("", earlier) == same for earlier in state.membership.refused.values())
