"""Machines, and failure domains, that are left out since they were lost too often by their own fault. Pure.

A machine with ``--max-machine-failures`` losses is refused when it joins again, under whatever name
(decision 106).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from swift_ft.recovery.job_state import State
from swift_ft.recovery.membership import OFTEN_EACH, Membership

_STANDS_OUT = 3
"""A failure domain is what fails if its machines are lost so many times as often as others."""
_OTHER_NAME = "start its launcher with another NODE_NAME, since under this one it stays out"
_ANEW = "or go on in a new run with --resume"


def why_left_out(state: State, machine: str, domain: str) -> str:
    """The reason for which a machine is not taken, with what would let it in again. Empty if it is taken.

    Args:
        machine: under any of its names.
        domain: its failure domain; empty if it is one of its own.
    """
    identity = state.membership.identity_of(machine)
    if identity in machines_left_out(state):
        return machine_in_words(state, identity)
    if domain and domain in domains_left_out(state):
        return domain_in_words(state, domain)
    return ""


def machines_left_out(state: State) -> frozenset[str]:
    """The identities of machines that were lost too often."""
    limit, losses = state.shape.max_machine_failures, state.membership.losses
    return frozenset(one for one in losses if limit is not None and losses[one].count >= limit)


def domains_left_out(state: State) -> frozenset[str]:
    """The failure domains that are left out: in these, what fails is what their machines share.

    One machine was lost too often, and those beside it that were not lost by chance, together, as often. And
    those beside it were lost far more often, each, than machines elsewhere: in a long run, every rack has
    machines that were lost by chance. If all that is there is of such domains, none is left out.
    """
    limit, losses = state.shape.max_machine_failures, state.membership.losses
    if limit is None:
        return frozenset()
    counts = dict[str, list[int]]()
    for one in losses.values():
        counts.setdefault(one.domain, []).append(one.count)
    suspects = {domain: each for domain, each in counts.items() if domain and _is_suspect(each, limit)}
    if not suspects:
        return frozenset()
    there = dict(_there(state.membership))
    # Two domains that fail would shut each other out.
    if suspects.keys() >= {*there.values()}:
        return frozenset()
    # Also machines that are away, since those were lost.
    sizes = Counter(({identity: one.domain for identity, one in losses.items()} | there).values())
    others = sum(size for domain, size in sizes.items() if domain not in suspects)
    # One more, since no loss among a few machines says little.
    lost = 1 + sum(sum(each) for domain, each in counts.items() if domain not in suspects)
    return frozenset(
        domain
        for domain, each in suspects.items()
        if (sum(each) - max(each)) * others >= _STANDS_OUT * lost * (sizes[domain] - 1)
    )


def is_deserted(state: State) -> bool:
    """Whether a run that had begun has no machine, and none can come back: all that were lost are left out.

    Of a machine that was lost and may still come, or that was asked of a scheduler, nobody else knows how it
    is: the run waits.
    """
    membership, left_out = state.membership, machines_left_out(state)
    if not state.generation or membership.slots or membership.spares or membership.requested or not left_out:
        return False
    lost = (one for one in membership.fenced if one not in membership.hosts and one not in membership.left)
    return {membership.identity_of(machine) for machine in lost} <= left_out


def deserted_in_words(state: State) -> str:
    """Such a run ends: why, and what would go on with its training."""
    names = ", ".join(sorted(machines_left_out(state)))
    return (
        f"no machine of this run is left: too often lost by their own fault were {names} "
        "(--max-machine-failures). Repair them, and go on in a new run with --resume"
    )


def nodes_left_out(state: State) -> tuple[str, ...]:
    """The names of the nodes whose machines are left out, as far as they have said one."""
    left_out, bearers = machines_left_out(state), state.membership.bearers
    return tuple(sorted({one.rpartition("/")[0] for one in left_out if one in bearers} - {""}))


def _is_suspect(counts: list[int], limit: int) -> bool:
    often = sum(count for count in counts if count >= OFTEN_EACH)
    return limit <= max(counts) <= often - max(counts)


def _there(membership: Membership) -> Iterator[tuple[str, str]]:
    """The machines that take part, and those that wait, with their failure domains."""
    for machine, slot in membership.slots.items():
        if machine not in membership.hosts and machine not in membership.fenced:
            yield membership.identity_of(machine), membership.domains.get(slot, "")
    for machine, spare in membership.spares.items():
        if machine not in membership.hosts:
            yield membership.identity_of(machine), spare.domain


def machine_in_words(state: State, identity: str) -> str:
    """A machine is left out: why, and what would let it in again."""
    # Without a name of its hardware, as in a pod, another launcher is another machine.
    remedy = _OTHER_NAME if identity in state.membership.bearers else "start its launcher again"
    times = _times(state.membership.losses[identity].count)
    return (
        f"machine {identity} is left out: it was lost {times} in this run by its own fault "
        f"(--max-machine-failures). Repair it, and {remedy}, {_ANEW}"
    )


def domain_in_words(state: State, domain: str) -> str:
    """The same of a failure domain."""
    counts = [losses.count for losses in state.membership.losses.values() if losses.domain == domain]
    return (
        f"all machines of failure domain {domain} are left out while others take part: {len(counts)} of them "
        f"were lost {_times(sum(counts))} in this run by their own fault (--max-machine-failures). Repair "
        f"what they share, and start their launchers with another --failure-domain and NODE_NAME, {_ANEW}"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
