"""Simulated jobs whose layers move while machines are lost: never a worker with layers of two layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from swift_ft.recovery import events, protocol
from swift_ft.recovery.handlers import recovery
from swift_ft.recovery.handlers.generations import open_generation
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.testing.simulation import JobKind, Violation, simulate
from swift_ft.testing.simulation.jobs.layered import LayeredWorker
from tests.support.simulation import run_seeds


def run_jobs(machines: int, workers: int, seeds: int) -> Counter[str]:
    return run_seeds(JobKind.LAYERED, machines, workers, seeds)


def test_four_machines() -> None:
    seen = run_jobs(4, 1, 1_500)
    assert seen[f"mode: {RecoveryMode.LAYOUT}"] > 300
    assert seen["layers moved"] > 1_000
    assert seen[f"mode: {RecoveryMode.REPLAY}"] > 100
    assert seen[f"mode: {RecoveryMode.FALLBACK}"] > 20
    assert seen["stopped in an iteration that others do not begin"] > 20
    assert seen["declined a layout"] > 5
    assert seen["finished"] > 4 * seen["gave up"]


@pytest.mark.thorough
@pytest.mark.parametrize(("machines", "workers", "seeds"), [(4, 1, 10_000), (2, 2, 1_000), (3, 1, 1_000)])
def test_many(machines: int, workers: int, seeds: int) -> None:
    assert run_jobs(machines, workers, seeds)["layers moved"] > seeds


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(20):
        assert simulate(JobKind.LAYERED, seed, 3) == simulate(JobKind.LAYERED, seed, 3)


# ------------------------------------------------------------------------------- defects that are found


def find(defect: str) -> None:
    with pytest.raises(Violation, match=defect):
        run_jobs(4, 1, 1_000)


def test_layers_that_came_are_kept_although_a_loss_ended_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: LayeredWorker, state: object) -> None:
        self.layout, self.aside = self.aside or self.layout, None

    monkeypatch.setattr(LayeredWorker, "settle", settle)
    find("goes live with the layers of")


def test_layers_move_between_workers_at_different_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_new_layout(state: State, plan: Plan, statuses: object) -> Plan:
        if state.layouts.pending is None:
            return plan
        return replace(plan, mode=RecoveryMode.LAYOUT, new_layout=state.layouts.pending.layers)

    def reached(state: State, event: object) -> State:
        pending = state.layouts.pending
        opened = open_generation(state)
        return replace(opened, layouts=replace(opened.layouts, pending=pending))

    monkeypatch.setattr(recovery, "with_new_layout", with_new_layout)
    handlers = {**protocol._HANDLERS, events.LayoutBoundaryReached: reached}
    monkeypatch.setattr(protocol, "_HANDLERS", handlers)
    with pytest.raises(Violation):
        run_jobs(4, 1, 1_000)


def test_logs_of_another_layout_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gap in the logs, a replay begins in one layout, and reads messages of another one."""
    monkeypatch.setattr(recovery, "_from_memory", lambda checkpoints, plan, generation: checkpoints)
    monkeypatch.setattr(
        LayeredWorker,
        "_history_of",
        lambda self, state: hash((state.checkpoints.epoch, state.checkpoints.log_since, state.layouts)),
    )
    find("of another history")
