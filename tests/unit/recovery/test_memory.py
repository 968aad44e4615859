"""Which state all can return to, by what the living have in memory."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.memory import CopyPlacement, holding_slots, newest_in_memory


def report(
    rank: int, kept: tuple[int, ...] = (), held: tuple[int, ...] = (), of: int | None = None
) -> StatusReported:
    return StatusReported(rank=rank, generation=2, iteration=None, kept=kept, held=held, held_of=of)


def test_all_must_have_the_same_iteration() -> None:
    reports = {0: report(0, (10, 15), (10, 15), 2), 1: report(1), 2: report(2, (10, 15), (10,), 1)}
    found = newest_in_memory(reports)
    assert found is not None
    assert (found.iteration, found.holders) == (10, {0: 0, 1: 2, 2: 2})
    reports[0] = report(0, (10, 15), (15,), 2)
    assert newest_in_memory({**reports, 2: report(2, (15,), (10,), 1)}) is None


def test_a_copy_of_its_own_comes_before_one_from_elsewhere() -> None:
    found = newest_in_memory({0: report(0, (5,), (5,), 1), 1: report(1, (5,), (5,), 0)})
    assert found is not None
    assert found.holders == {0: 0, 1: 1}


def test_each_machine_is_a_domain_of_its_own() -> None:
    """Then the next machine holds the copies, as it does where all are in one domain."""
    for domains in (("",) * 3, ("a",) * 3, ("a", "b", "c"), ("", "a", "b")):
        placement = CopyPlacement.of(domains, 2)
        assert placement is not None
        assert placement.holders == (2, 3, 4, 5, 0, 1)
        assert placement.owners == (4, 5, 0, 1, 2, 3)
        assert placement.exposed == ((0, 1, 2) if set(domains) == {"a"} else ())
    assert CopyPlacement.of(("a",), 2) is None


def test_the_holder_is_in_another_domain() -> None:
    assert holding_slots(("a", "a", "b", "b")) == (2, 3, 0, 1)
    assert holding_slots(("a", "b", "a", "b")) == (1, 0, 3, 2)
    assert holding_slots(("a", "a", "b", "c", "c")) == (2, 3, 4, 0, 1)
    assert holding_slots(("a", "a", "", "")) == (2, 3, 0, 1)


def test_a_domain_with_most_machines() -> None:
    """As few of its copies as possible stay in it, and none at its own machine."""
    placement = CopyPlacement.of(("b", "a", "b", "b"), 1)
    assert placement is not None
    assert placement.holders == (1, 3, 0, 2)
    assert placement.exposed == (2, 3)


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=2, max_size=24), st.integers(1, 3))
def test_as_few_as_possible_stay_in_their_domain(domains: list[str], workers: int) -> None:
    placement = CopyPlacement.of(domains, workers)
    assert placement is not None
    ranks = range(len(domains) * workers)
    assert sorted(placement.holders) == list(ranks)
    assert all(placement.owners[placement.holders[rank]] == rank for rank in ranks)
    assert all(placement.holders[rank] // workers != rank // workers for rank in ranks)
    assert all(placement.holders[rank] % workers == rank % workers for rank in ranks)
    largest = max(Counter(name for name in domains if name).values(), default=1)
    at_least = len(domains) if largest == len(domains) else max(0, 2 * largest - len(domains))
    assert len(placement.exposed) == at_least


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=2, max_size=16), st.data())
def test_a_domain_that_is_lost_as_a_whole(domains: list[str], data: st.DataObject) -> None:
    """If none of its copies stays in it, each state is still in memory."""
    placement = CopyPlacement.of(domains, 1)
    assert placement is not None
    lost = data.draw(st.sampled_from(domains))
    gone = {slot for slot, name in enumerate(domains) if name == lost} if lost else {domains.index("")}
    alive = {slot: report(slot, (5,), (5,), placement.owners[slot]) for slot in range(len(domains))}
    found = newest_in_memory({**alive, **{slot: report(slot) for slot in gone}})
    assert (found is None) == bool(gone & set(placement.exposed))
    if found is not None:
        assert gone.isdisjoint(found.holders.values())
