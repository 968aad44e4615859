"""Who is at fault when computations of a step differ, and what that means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from swift_ft.plain import from_plain
from swift_ft.runtime.verify.evidence import STATE, Entry, Evidence
from swift_ft.runtime.verify.verdict import (
    Account,
    Fault,
    Kind,
    Verdict,
    account_of,
    differences,
    judge,
    own_faults,
)

Told = Mapping[str, int]
"""By place, the digest. A place that begins with ``<`` is received, one with ``=`` is a collective of all."""


def evidence(told: Told, workers: int = 2) -> Evidence:
    found = Evidence()
    for place, digest in told.items():
        members = tuple(range(workers)) if place.startswith("=") else ()
        found.entries[place] = Entry({"x": digest}, members, place.startswith("<"))
    return found


def verdict(*workers: Sequence[Told], proven: int = 0, stages: Sequence[int] = ()) -> Verdict:
    """The verdict on what each worker tells of its computations; all have one stage unless it is said."""
    runs = [[evidence(told, len(workers)) for told in of_worker] for of_worker in workers]
    accounts = [
        from_plain(Account, json.loads(json.dumps(asdict(account_of(of_worker, proven)))))
        for of_worker in runs
    ]
    faults = [own_faults(rank, of_worker[0].places, accounts) for rank, of_worker in enumerate(runs)]
    return judge(accounts, faults, stages or [0] * len(workers))


def replica(bucket: int, state: int) -> Told:
    return {"=bucket": bucket, STATE: state}


RIGHT = replica(1, 1)


def test_a_wrong_gradient_is_its_workers_fault_and_not_the_replicas() -> None:
    """The average is wrong on all of them, and so is the state."""
    for wrong in (0, 1):
        mine, theirs = [RIGHT] * 3, [RIGHT] * 3
        mine[wrong], theirs[wrong] = replica(2, 2), replica(1, 2)
        found = verdict(theirs, mine)
        assert found == Verdict(Kind.ONCE, {1: Fault("=bucket", ("x",))}, right=True)


def test_a_wrong_update_is_the_fault_of_whose_state_differs() -> None:
    found = verdict([RIGHT] * 3, [RIGHT, replica(1, 2), RIGHT])
    assert found == Verdict(Kind.ONCE, {1: Fault(STATE, ("x",))}, right=True)


def test_of_two_buckets_a_later_one_may_follow_from_the_first() -> None:
    """A worker whose second contribution differs has had the first average by then, perhaps."""
    right = {"=one": 1, "=two": 1, STATE: 1}
    found = verdict([{"=one": 2, "=two": 1, STATE: 2}, right, right], [{"=one": 1, "=two": 2}, right, right])
    assert [*found.faults] == [0]


def test_two_at_the_same_place_are_both_at_fault() -> None:
    found = verdict([replica(2, 2), RIGHT, RIGHT], [replica(3, 2), RIGHT, RIGHT])
    assert [*found.faults] == [0, 1]


def first(forward: int, backward: int) -> Told:
    return {"forward": forward, "<backward": backward, STATE: backward}


def last(forward: int, backward: int) -> Told:
    return {"<forward": forward, "backward": backward, STATE: backward}


def test_a_wrong_message_is_its_senders_fault() -> None:
    found = verdict([first(2, 2), first(1, 1), first(1, 1)], [last(2, 2), last(1, 1), last(1, 1)])
    assert found == Verdict(Kind.ONCE, {0: Fault("forward", ("x",))}, right=True)
    found = verdict([first(1, 2), first(1, 1), first(1, 1)], [last(1, 2), last(1, 1), last(1, 1)])
    assert found == Verdict(Kind.ONCE, {1: Fault("backward", ("x",))}, right=True)


def test_a_message_that_is_missing_differs() -> None:
    found = verdict([{STATE: 1}, first(1, 1), first(1, 1)], [last(1, 1)] * 3)
    assert [*found.faults] == [0]


def test_a_machine_that_is_wrong_each_time_is_told_from_its_peers() -> None:
    mine = [replica(n, n) for n in (2, 3, 4)]
    theirs = [replica(1, n) for n in (2, 3, 4)]
    found = verdict(theirs, mine)
    assert found == Verdict(Kind.EACH_TIME, {1: Fault("=bucket", ("x",))}, right=False)


def test_a_step_that_is_not_deterministic_is_no_machines_fault() -> None:
    both = [[replica(10 * rank + n, n) for n in (2, 3, 4)] for rank in (1, 2)]
    found = verdict(*both)
    assert (found.kind, found.named) == (Kind.NOT_DETERMINISTIC, False)


def test_another_stage_shows_nothing_of_what_differs() -> None:
    """The second stage alone is not deterministic: the first one came out alike, and computes otherwise."""
    right = [first(1, 1)] * 3
    sampled = [{"<forward": 1, "backward": n, STATE: n} for n in (1, 2, 3)]
    begins = [{"forward": 1, STATE: 1}] * 3
    assert verdict(begins, sampled, stages=(0, 1)).kind == Kind.NOT_DETERMINISTIC
    assert verdict(begins, sampled, right, stages=(0, 1, 0)).kind == Kind.NOT_DETERMINISTIC
    found = verdict(begins, sampled, right, stages=(0, 1, 1))
    assert (found.kind, [*found.faults]) == (Kind.EACH_TIME, [1])


def test_in_a_pipeline_earlier_steps_show_whether_it_is_deterministic() -> None:
    """Of the second stage nothing can be told: it computes with what is unlike."""
    workers = [first(n, n) for n in (1, 2, 3)], [last(n, n) for n in (1, 2, 3)]
    assert verdict(*workers).kind == Kind.NOT_DETERMINISTIC
    found = verdict(*workers, proven=1)
    assert (found.kind, [*found.faults], found.right) == (Kind.EACH_TIME, [0], False)


def averaged(bucket: int, average: int) -> Told:
    return {"=bucket": bucket, "<average": average, STATE: average}


def test_a_wrong_average_of_what_was_right_is_nobodys_fault() -> None:
    right, wrong = averaged(1, 1), averaged(1, 2)
    found = verdict([wrong, right, right], [wrong, right, right])
    assert found == Verdict(Kind.ONCE, {}, right=True, arrived=Fault("<average", ("x",)))
    each = verdict([averaged(1, n) for n in (1, 2, 3)], [averaged(1, n) for n in (1, 2, 3)], proven=1)
    assert (each.kind, each.faults, each.arrived) == (Kind.NOT_DETERMINISTIC, {}, Fault("<average", ("x",)))


def test_a_shard_that_was_summed_wrong_is_not_its_owners_fault() -> None:
    """What it gives to the others after that follows from the sum."""

    def shard(result: int) -> Told:
        return {"=gradients": 1, "<sum": result, "=parameters": result, STATE: result}

    found = verdict([shard(1)] * 3, [shard(2), shard(1), shard(1)])
    assert (found.kind, found.faults, found.arrived) == (Kind.ONCE, {}, Fault("<sum", ("x",)))


def test_a_wrong_gradient_is_a_fault_also_where_the_average_is_seen() -> None:
    right, theirs = averaged(1, 1), averaged(1, 2)
    found = verdict([theirs, right, right], [averaged(2, 2), right, right])
    assert found == Verdict(Kind.ONCE, {1: Fault("=bucket", ("x",))}, right=True)
    mine, others = [averaged(n, n) for n in (2, 3, 4)], [averaged(1, n) for n in (2, 3, 4)]
    each = verdict(others, mine)
    assert each == Verdict(Kind.EACH_TIME, {1: Fault("=bucket", ("x",))}, right=False), "its peer shows it"


def test_nothing_differs() -> None:
    assert differences(evidence(RIGHT), evidence(RIGHT)) == ()
