"""Simulated jobs that change to other worlds while machines are lost: one world trains, whatever fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from immutables import Map

from swift_ft.config.run_plan import RunPlan
from swift_ft.costs.survivors_plan import plan_after_loss
from swift_ft.recovery import events, orders, protocol, survivors
from swift_ft.recovery.handlers import worlds as changes
from swift_ft.recovery.job_state import State
from swift_ft.recovery.memory import MemoryCheckpoint, newest_in_memory
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.recovery.worlds import Change, Worlds
from swift_ft.testing.simulation import JobKind, Violation, clock, simulate
from swift_ft.testing.simulation.clock import Clock
from swift_ft.testing.simulation.machine import Machine
from tests.support.simulation import run_seeds

KINDS = (JobKind.WORLDS, JobKind.REPLICATED_WORLDS)
PROGRESS = ("nobody prepared", "some prepared", "all prepared", "a switch requested", "some offered")
LATE = ("all offered", "some taken")


def check_changes(seen: Counter[str], seeds: int) -> None:
    """Worlds of all sizes take over, and changes are given up at each stage."""
    for size in ("more", "fewer", "as many"):
        assert seen[f"switched to {size} machines"] > seeds // 40, seen
    for progress in (*PROGRESS, *LATE):
        assert seen[f"given up with {progress}"] > seeds // 100, (progress, seen)
    assert seen["a machine became a spare"] > seeds // 20
    assert seen["given up by an agent"] > seeds // 10
    assert seen["finished"] > 4 * seen["gave up"]


def test_pipelines() -> None:
    seen = run_seeds(JobKind.WORLDS, 3, 1, 400)
    check_changes(seen, 400)
    assert seen[f"mode: {RecoveryMode.REPLAY}"] > 100
    assert seen[f"mode: {RecoveryMode.FALLBACK}"] > 10


def test_replicas() -> None:
    seen = run_seeds(JobKind.REPLICATED_WORLDS, 3, 1, 400)
    check_changes(seen, 400)
    assert seen[f"mode: {RecoveryMode.REPLICA}"] > 200


def test_survivors() -> None:
    """A smaller world follows losses, or is given up at each stage, and guests come. It grows back."""
    seen = run_seeds(JobKind.SURVIVORS, 4, 1, 400)
    check_survivors(seen, 400)
    assert seen["grew back"] > 4, seen
    assert seen["grew back in part"] > 0, seen
    assert seen["finished"] > 4 * seen["gave up"]


def check_survivors(seen: Counter[str], seeds: int) -> None:
    assert seen["switched after a loss"] > seeds // 50, seen
    for progress in ("nobody prepared", "some prepared", "some offered", "some taken"):
        assert seen[f"given up with survivors: {progress}"] > 0, (progress, seen)
    assert seen["a guest"] > seeds // 40
    assert seen[f"mode: {RecoveryMode.REPLICA}"] > seeds // 4


def test_pipelines_of_survivors() -> None:
    """Pipelines become unlike, and each layer comes from whoever holds it."""
    seen = run_seeds(JobKind.SURVIVING_PIPELINES, 6, 1, 100)
    check_pipelines(seen, 100)
    assert seen["grew back"] + seen["grew back in part"] > 1, seen


def check_pipelines(seen: Counter[str], seeds: int) -> None:
    assert seen["switched after a loss"] > seeds // 40, seen
    assert seen["unlike pipelines follow: True"] > seeds // 60, seen
    assert seen["a guest"] > seeds // 20
    assert seen["finished"] > 4 * seen["gave up"]


def test_shards_of_survivors() -> None:
    """Copies in memory are what fewer workers go on with, those of lost ones, too."""
    check_shards(run_seeds(JobKind.SURVIVING_SHARDS, 3, 1, 400), 400)


def check_shards(seen: Counter[str], seeds: int) -> None:
    assert seen["switched to copies"] == seen["switched after a loss"] > seeds // 150, seen
    assert seen["offered another's copy"] > seeds // 50, seen
    assert seen["a guest"] > seeds // 20
    assert seen[f"mode: {RecoveryMode.MEMORY}"] > seeds // 10
    assert seen["finished"] > 4 * seen["gave up"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machines", "workers", "seeds"), [(3, 1, 2_000), (4, 1, 1_000), (4, 2, 600), (2, 1, 1_000)]
)
def test_many_with_shards_of_survivors(machines: int, workers: int, seeds: int) -> None:
    check_shards(run_seeds(JobKind.SURVIVING_SHARDS, machines, workers, seeds), seeds)


@pytest.mark.thorough
def test_shards_of_survivors_through_heads() -> None:
    check_shards(run_seeds(JobKind.SURVIVING_SHARDS, 4, 1, 1_000, heads=True), 1_000)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machines", "workers", "seeds"), [(6, 1, 800), (4, 1, 800), (4, 2, 400), (8, 1, 400)]
)
def test_many_with_pipelines_of_survivors(machines: int, workers: int, seeds: int) -> None:
    check_pipelines(run_seeds(JobKind.SURVIVING_PIPELINES, machines, workers, seeds), seeds)


def test_a_plan_of_other_pipelines_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever plans has miscounted, and nobody looks at it."""

    def one_each(pipelines: Sequence[int], sizes: Any, *, unlike: bool) -> RunPlan:
        others = [1] * (len(pipelines) - 1)
        return plan_after_loss([*others, sum(pipelines) - len(others)], sizes, unlike=unlike)

    monkeypatch.setattr(clock, "plan_after_loss", one_each)
    monkeypatch.setattr(survivors, "is_plan_for", lambda text, stages, sizes: True)
    with pytest.raises(Violation, match="stages follow, and one needs"):
        run_seeds(JobKind.SURVIVING_PIPELINES, 6, 1, 400)


@pytest.mark.thorough
@pytest.mark.parametrize(("machines", "workers", "seeds"), [(4, 1, 400), (3, 1, 1_500), (3, 2, 300)])
def test_many_with_survivors(machines: int, workers: int, seeds: int) -> None:
    check_survivors(run_seeds(JobKind.SURVIVORS, machines, workers, seeds), seeds)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("machines", "workers", "seeds"), [(4, 1, 4_000), (3, 1, 4_000), (2, 2, 1_500)])
def test_many(kind: JobKind, machines: int, workers: int, seeds: int) -> None:
    check_changes(run_seeds(kind, machines, workers, seeds), seeds)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_through_heads(kind: JobKind) -> None:
    for seed in range(1_000):
        simulate(kind, seed, 3, heads=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_the_same_run_every_time(kind: JobKind) -> None:
    for seed in range(10):
        assert simulate(kind, seed, 3) == simulate(kind, seed, 3)


# ------------------------------------------------------------------------------- defects that are found


def find(defect: str, kind: JobKind = JobKind.WORLDS, seeds: int = 1_500) -> None:
    with pytest.raises(Violation, match=defect):
        run_seeds(kind, 3, 1, seeds)


def test_a_world_takes_over_before_all_have_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def state_taken(state: State, event: Any) -> State:
        change = state.worlds.change
        if change is None or change.world.number != event.world or not changes.all_offered(state, change):
            return state
        return changes._switch(state, change)

    handlers = {**protocol._HANDLERS, events.StateTaken: state_taken}
    monkeypatch.setattr(protocol, "_HANDLERS", handlers)
    find("have not taken the state of iteration")


def test_a_world_takes_over_before_all_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "all_offered", lambda state, change: len(change.offered) >= 1)
    monkeypatch.setattr(orders, "_order_in_next", _eager_order)
    find("takes over with|begins with another state than its last one had|have stopped")


def _eager_order(state: State, rank: int, world: int) -> orders.WorkerOrder:
    change = state.worlds.change
    if change is not None and change.world.number == world and change.offered and rank not in change.taken:
        return orders.WorkerOrder.TAKE if rank in change.prepared else orders.WorkerOrder.PREPARE
    return _ORDER_IN_NEXT(state, rank, world)


_ORDER_IN_NEXT = orders._order_in_next


def test_a_survivor_in_the_middle_of_an_update_is_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def sources_of(statuses: Any, held: Any, committed: int | None) -> survivors.Sources:
        whole = {rank: replace(status, updated=()) for rank, status in statuses.items()}
        return _SOURCES_OF(whole, held, committed)

    monkeypatch.setattr(changes, "sources_of", sources_of)
    find("takes ReplicaState|begins iteration", JobKind.SURVIVORS)


_SOURCES_OF, _COPIES_OF = survivors.sources_of, survivors._copies_of


def test_copies_of_two_iterations_are_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each survivor offers its newest copy."""

    def newest_of_each(statuses: Any, workers: int | None = None) -> MemoryCheckpoint | None:
        found = newest_in_memory(statuses, workers)
        newest = max((at for status in statuses.values() for at in (*status.kept, *status.held)), default=0)
        return found and MemoryCheckpoint(newest, found.holders)

    monkeypatch.setattr(survivors, "newest_in_memory", newest_of_each)
    find("offers .* as a state of iteration", JobKind.SURVIVING_SHARDS)


def test_copies_without_those_of_lost_workers_are_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_survivors(statuses: Any, workers: int, committed: int) -> survivors.Sources:
        found = _COPIES_OF(statuses, workers, committed)
        return found._replace(ranks=tuple(rank for rank in found.ranks if rank in statuses))

    monkeypatch.setattr(survivors, "_copies_of", of_survivors)
    find("were there", JobKind.SURVIVING_SHARDS)


def test_logs_of_the_world_before_count(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = changes._switch

    def without_gaps(state: State, change: Change) -> State:
        after = switch(state, change)
        return replace(after, checkpoints=replace(after.checkpoints, log_gap_before=Map()))

    monkeypatch.setattr(changes, "_switch", without_gaps)
    find("needs iteration .* log: missing")


def test_parts_of_the_world_before_count(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = changes._switch

    def in_the_same_epoch(state: State, change: Change) -> State:
        after, before = switch(state, change), state.checkpoints
        same = replace(after.checkpoints, epoch=before.epoch, parts=before.parts)
        return replace(after, checkpoints=same)

    monkeypatch.setattr(changes, "_switch", in_the_same_epoch)
    find("seed")


def test_nobody_gives_a_change_up_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "give_up_change", lambda self, participants: False)
    monkeypatch.setattr(Machine, "_watch_next", lambda self: False)
    find("stuck in phase live|has been under way")


def test_a_loss_does_not_end_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_change(worlds: Worlds, reason: str) -> Worlds:
        return worlds

    for module in ("generations", "worlds"):
        monkeypatch.setattr(f"swift_ft.recovery.handlers.{module}.without_change", without_change)
    find("seed")
