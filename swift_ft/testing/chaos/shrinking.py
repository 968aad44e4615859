"""The smallest plan that still fails: fewer faults first, then plainer ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from swift_ft.faults import Fault
from swift_ft.testing.chaos.trial import Outcome, Trial
from swift_ft.testing.chaos.unstable import variable_of

Plan = tuple[Fault, ...]
_NAMED_BY_THE_REASON = (Outcome.CRASHED, Outcome.UNLOADABLE)
"""Outcomes with many causes. The reason of any other one says where it was seen, not why it came to that."""
_WORKER = re.compile(r"^worker \d+\.")
_NUMBERED = re.compile(r"\S*\d\S*")


def fails_alike(one: Trial, other: Trial, differing: Callable[[Trial], Collection[str]]) -> bool:
    """Whether two runs have failed in the same way, as far as outcomes and reasons tell.

    Numbers, and the names and addresses with digits in them, are other ones in each run. Of two that are
    wrong something has to differ in both, or nothing but variables of the script.

    Args:
        one: a run.
        other: another one.
        differing: tells the names of all that differs in a run.
    """
    if one.outcome != other.outcome:
        return False
    if one.outcome == Outcome.WRONG:
        ours, theirs = differing(one), differing(other)
        if ours and theirs:
            of_scripts = all(variable_of(name) is not None for name in (*ours, *theirs))
            return of_scripts or not _on_any_worker(ours).isdisjoint(_on_any_worker(theirs))
    elif one.outcome not in _NAMED_BY_THE_REASON:
        return True
    return _NUMBERED.sub("#", one.reason) == _NUMBERED.sub("#", other.reason)


def _on_any_worker(names: Iterable[str]) -> set[str]:
    return {_WORKER.sub("worker.", name) for name in names}


def shrunk(plan: Plan, fails: Callable[[Plan], bool], most_runs: int) -> tuple[Plan, int]:
    """A smaller plan that fails as well, or the same one.

    Args:
        plan: fails.
        fails: runs a plan, and says whether it fails in the same way.
        most_runs: the largest number of plans to run.

    Returns:
        the plan, and how many were run.
    """
    tried = {plan}
    runs = 0
    while True:
        for smaller in _smaller(plan):
            if smaller in tried:
                continue
            if runs >= most_runs:
                return plan, runs
            tried.add(smaller)
            runs += 1
            if fails(smaller):
                plan = smaller
                break
        else:
            return plan, runs


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that are a step smaller; those that save most first."""
    if len(plan) > 1:
        if len(plan) > 2:
            yield plan[: len(plan) // 2]
            yield plan[len(plan) // 2 :]
        for place in range(len(plan)):
            yield plan[:place] + plan[place + 1 :]
    for place, fault in enumerate(plan):
        for plainer in _plainer(fault):
            yield (*plan[:place], plainer, *plan[place + 1 :])


def _plainer(fault: Fault) -> Iterator[Fault]:
    if fault.part is not None:
        yield replace(fault, microbatch=None, bucket=None)
    if fault.committed is not None:
        yield replace(fault, committed=None)
    if fault.iteration:
        for earlier in dict.fromkeys((0, 1, fault.iteration // 2, fault.iteration - 1)):
            if earlier < fault.iteration:
                yield replace(fault, iteration=earlier)
    if fault.peer is not None:
        yield replace(fault, peer=None)
    if fault.index and fault.peer != 0:
        yield replace(fault, index=0)
