"""Machines, and failure domains, that are left out since they were lost too often by their own fault. Pure.

A machine with ``--max-machine-failures`` losses is refused when it joins again, under whatever name
(decision 106).
"""

from __future__ import annotations

from collections.abc import Iterator

from swift_ft.recovery.job_state import State
from swift_ft.recovery.membership import OFTEN_EACH, Membership

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
    if domain and domain in domains_left_out(state) and _has_others(state.membership, domain):
        return domain_in_words(state, domain)
    return ""


def machines_left_out(state: State) -> frozenset[str]:
    """The identities of machines that were lost too often."""
    limit, losses = state.shape.max_machine_failures, state.membership.losses
    return frozenset(one for one in losses if limit is not None and losses[one].count >= limit)


def domains_left_out(state: State) -> frozenset[str]:
    """The failure domains that are left out while machines outside of them take part.

    One machine was lost too often, and those beside it that were not lost by chance, together, as often: what
    fails is what they share.
    """
    limit, counts = state.shape.max_machine_failures, dict[str, list[int]]()
    if limit is None:
        return frozenset()
    for losses in state.membership.losses.values():
        if losses.domain and losses.count >= min(OFTEN_EACH, limit):
            counts.setdefault(losses.domain, []).append(losses.count)
    return frozenset(of for of, each in counts.items() if limit <= max(each) <= sum(each) - max(each))


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


def _has_others(membership: Membership, domain: str) -> bool:
    """Whether a machine outside of a domain takes part."""
    return any(other != domain for other in _domains_of(membership))


def _domains_of(membership: Membership) -> Iterator[str]:
    for machine, slot in membership.slots.items():
        if machine not in membership.hosts:
            yield membership.domains.get(slot, "")
    for machine, spare in membership.spares.items():
        if machine not in membership.hosts:
            yield spare.domain
