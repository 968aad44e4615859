"""Replicas compare their variables in their first steps, also where a loss comes in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from swift_ft.config import store_keys
from swift_ft.errors import UnsupportedError
from swift_ft.runtime.replicas.own_variables import OwnVariables

RANKS = (0, 1, 2)
NOISE = "model\nnoise"
PLACE = ("model", "noise")


class Store(dict[str, Any]):
    """A rendezvous store."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> Any:  # type: ignore[override]
        return self[key]


class Variables:
    """Those of a script with one generator, which each step moves on."""

    def __init__(self, seed: int) -> None:
        self.seed, self.state = seed, seed
        self.own: frozenset[tuple[str, str]] = frozenset()
        self.alike: frozenset[tuple[str, str]] = frozenset()
        self.of_own: dict[str, Any] = {}
        self.behind: frozenset[tuple[str, str]] = frozenset()

    def digests(self) -> dict[str, int]:
        return {NOISE: self.state}

    def to_save(self) -> dict[str, dict[str, int]]:
        return {PLACE[0]: {PLACE[1]: self.state}}

    def digests_of(self, saved: dict[str, dict[str, int]]) -> dict[str, int]:
        return {NOISE: saved[PLACE[0]][PLACE[1]]}

    def packed(self, saved: dict[str, dict[str, int]], most_bytes: int) -> str:
        return json.dumps(saved)

    def unpacked(self, text: str) -> Any:
        return json.loads(text)

    def digests_of_generators(self) -> dict[str, int]:
        return {NOISE: self.seed}

    def note_generators(self) -> None:
        pass

    def goes_on(self, place: Any) -> bool:
        return bool(place == PLACE)


class Writer:
    """Does errands when it is told to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._errands: list[Callable[[], object]] = []

    def do(self, errand: Callable[[], object]) -> None:
        self._errands.append(errand)

    def set(self, key: str, value: str) -> None:
        self.do(lambda: self._store.set(key, value))

    def flush(self) -> None:
        while self._errands:
            self._errands.pop(0)()


class Replica:
    """A worker with replicas."""

    def __init__(self, rank: int, seed: int, store: Store) -> None:
        self.rank, self.variables, self.writer = rank, Variables(seed), Writer(store)
        parts: list[Any] = [self.variables, store, self.writer]
        self.compared = OwnVariables(rank, *parts)

    def begin(self, iteration: int) -> None:
        self.compared.begin(iteration, RANKS)
        self.variables.state += 1

    def recover(self) -> None:
        self.writer.flush()  # as each worker does before it reports

    def take_over(self, source: Replica) -> None:
        with self.compared.kept(RANKS, 0, own_at=None):
            if PLACE not in self.variables.own:
                self.variables.state = source.variables.state


class Job:
    """Three replicas.

    Args:
        seeds: one for each.
    """

    def __init__(self, seeds: tuple[int, int, int]) -> None:
        self._seeds = seeds
        self.store = Store()
        self.replicas = [Replica(rank, seed, self.store) for rank, seed in enumerate(seeds)]
        self.live()

    def live(self) -> None:
        for replica in self.replicas:
            replica.compared.live()

    def step(self, iteration: int) -> None:
        for replica in self.replicas:
            replica.begin(iteration)

    def lose(self, rank: int) -> Replica:
        """Its replacement is there, and training goes on."""
        self.replicas[rank] = new = Replica(rank, self._seeds[rank], self.store)
        for replica in self.replicas:
            replica.recover()
        new.take_over(self.replicas[rank - 1])
        self.live()
        return new

    def go_on(self, first: int) -> None:
        """With all notes written between two steps."""
        for iteration in range(first, first + 6):
            for replica in self.replicas:
                replica.writer.flush()
            self.step(iteration)


def refused(job: Job, first: int) -> None:
    with pytest.raises(UnsupportedError, match=r"The generator model\.noise goes on from step to step"):
        job.go_on(first)


UNLIKE, ALIKE = (5, 500, 50_000), (5, 5, 5)


def test_an_undisturbed_run() -> None:
    refused(Job(UNLIKE), 0)
    job = Job(ALIKE)
    job.go_on(0)
    assert {replica.variables.alike for replica in job.replicas} == {frozenset({PLACE})}


@pytest.mark.parametrize("begun", [1, 2, 3, 4])
@pytest.mark.parametrize("seeds", [UNLIKE, ALIKE])
def test_a_loss_in_the_first_steps(begun: int, seeds: tuple[int, int, int]) -> None:
    """In the very last of the steps that have begun; it is repeated."""
    job = Job(seeds)
    for iteration in range(begun):
        job.step(iteration)
    new = job.lose(1)
    assert (new.variables.state == new.variables.seed) == (seeds == UNLIKE)
    first = begun - 1
    if seeds == UNLIKE:
        refused(job, first)
        return
    for replica in job.replicas:
        replica.variables.state = 7  # as it was put back
    job.go_on(first)
    alike = [replica.variables.alike for replica in job.replicas]
    assert alike.count(frozenset({PLACE})) >= len(job.replicas) - 1


def test_two_losses_in_the_first_steps() -> None:
    job = Job(UNLIKE)
    job.step(0)
    job.step(1)
    job.lose(1)
    job.step(1)
    job.step(2)
    job.lose(2)
    refused(job, 2)


def test_a_replacement_compares_nothing_where_all_had_noted() -> None:
    """It has been given the generator of another one by then."""
    job = Job(ALIKE)
    job.go_on(0)
    job.lose(1)
    job.store.set(store_keys.variables(0), json.dumps([2, {NOISE: 1}]))
    job.go_on(6)


@pytest.mark.parametrize(
    ("own_at", "iteration", "behind"), [(None, 7, True), (None, 5, False), (7, 7, False), (6, 7, True)]
)
def test_what_is_of_an_earlier_iteration(own_at: int | None, iteration: int, behind: bool) -> None:
    """A replacement has what its rank noted in the checkpoint after iteration 4; a survivor has its own."""
    job = Job(UNLIKE)
    for replica in job.replicas:
        replica.compared.note(5, RANKS)
        replica.writer.flush()
    new = job.replicas[1]
    with new.compared.kept(RANKS, iteration, own_at=own_at):
        assert new.variables.own == {PLACE}
        assert new.variables.behind == ({PLACE} if behind else set())
    assert not new.variables.behind


@pytest.mark.parametrize(("iteration", "behind"), [(5, False), (7, True)])
def test_what_a_lost_worker_never_changed(
    iteration: int, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sum that only rank 0 makes: a replacement of rank 1 has what rank 1 had, 0.

    Of a later iteration nobody knows it: the sum may have begun in between.
    """
    job = Job(UNLIKE)
    untouched = job.replicas[1].variables
    monkeypatch.setattr(untouched, "digests_of", lambda saved: {})
    monkeypatch.setattr(untouched, "packed", lambda saved, most_bytes: json.dumps({}))
    for replica in job.replicas:
        replica.compared.note(5, RANKS)
        replica.writer.flush()
    with job.replicas[1].compared.kept(RANKS, iteration, own_at=None):
        assert untouched.own == {PLACE}
        assert bool(untouched.behind) == behind


def note_of(job: Job, rank: int, **digests: int) -> None:
    """A worker's note in the third step: one of its variables beside the generator."""
    named = {f"model.{name}\nseen": digest for name, digest in digests.items()}
    job.store.set(store_keys.variables(rank), json.dumps([2, {NOISE: 5, **named}]))


def test_what_goes_with_layers_that_have_moved_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Layer 3 was in one of the pipelines' stages only: nothing is known of it."""
    job = Job(ALIKE)
    note_of(job, 0, layer1=1, layer2=5, layer3=7)
    note_of(job, 1, layer1=2, layer2=5)
    note_of(job, 2, layer1=3, layer2=5)
    replica = job.replicas[1]
    with replica.compared.kept(RANKS, 4, own_at=None, shared=lambda place: "layer" in place[0]):
        assert not replica.variables.own
    (line,) = [one.getMessage() for one in caplog.records if "each pipeline has" in one.getMessage()]
    assert line.startswith("each pipeline has model.layer1.seen for itself")


def test_buffers_of_layers_are_compared_and_named(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(ALIKE)
    for rank, replica in enumerate(job.replicas):
        replica.compared.buffers_of_layers = lambda rank=rank: {"model.3.load": rank, "model.3.mask": 7}  # type: ignore[misc]
    job.go_on(0)
    replica = job.replicas[1]
    with replica.compared.kept(RANKS, 4, own_at=None):
        assert not replica.variables.own
    assert "each pipeline has model.3.load for itself" in caplog.text
