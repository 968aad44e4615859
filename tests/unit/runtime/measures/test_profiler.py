"""What workers publish about themselves, and what is made of it: without processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.config.worker_context import WorkerContext
from swift_ft.costs.job import Worker
from swift_ft.errors import UsageError
from swift_ft.logging import IterationStats
from swift_ft.network import JobSecret
from swift_ft.runtime.measures.profiler import Profiler
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.writers import AtOnce

ENOUGH = 7  # iterations
STAGES = [Worker(("stage 0",), (0,)), Worker(("stage 1",), (1,))]


class Speed:
    """How fast a part of a checkpoint was written, and the interval between two copies in memory."""

    value: float | None = None
    snapshot_every: int | None = None

    def __call__(self) -> float | None:
        return self.value


@pytest.fixture
def speed() -> Speed:
    return Speed()


@pytest.fixture
def profilers(speed: Speed) -> list[Profiler]:
    """Of two machines with a worker each; the state has 24 bytes of weights and 8 of optimizer state."""
    held = HashStore()
    store = RendezvousStore(lambda: held)
    made = []
    for rank in range(2):
        context = WorkerContext(
            run_id="run",
            store=StoreAddress.tcp("localhost", 1),
            machine=f"machine{rank}",
            address="localhost",
            agent_pid=1,
            rank=rank,
            world_size=2,
            workers_per_machine=1,
            started_in=1,
            config=RunConfig(report_timeout_s=0.05),
            secret=JobSecret.generated(),
        )
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)
        model.bias.grad = torch.ones(2)
        optimizer.step()
        state = TrainingState({"model": model, "optimizer": optimizer})
        made.append(Profiler(context, store, AtOnce(store), state, speed, lambda: speed.snapshot_every))
    return made


def train(profilers: list[Profiler], iterations: int, *, pipeline: bool = True) -> None:
    for i in range(iterations):
        for rank, profiler in enumerate(profilers):
            account = IterationStats(step_s=100.0 if i < 2 else 1.0, bubble_s=0.25 * rank)  # a slow warm-up
            profiler.add(account, {1 - rank: 50} if pipeline else None)


def test_what_is_on_each_worker_is_known_before_anything_is_measured(profilers: list[Profiler]) -> None:
    profilers[0].publish_place(STAGES[0])
    with pytest.raises(UsageError, match=r"Not all workers have asked for a plan.* within 0.05 s"):
        profilers[0].job(groups=(0, 1), checkpoint_every=10)
    profilers[1].publish_place(STAGES[1])
    assert list(profilers[0].job(groups=(0, 1), checkpoint_every=10).workers) == STAGES


def test_the_first_iterations_are_measured(profilers: list[Profiler], speed: Speed) -> None:
    for profiler, place in zip(profilers, STAGES, strict=True):
        profiler.publish_place(place)
    train(profilers, ENOUGH - 1)
    assert profilers[0].job(groups=(), checkpoint_every=10).workers[1].measured.iteration_s is None
    train(profilers, 1)
    measured = profilers[0].job(groups=(), checkpoint_every=10).workers[1].measured
    assert (measured.iteration_s, measured.compute_s, measured.bubble_s) == (1.0, 0.75, 0.25)
    assert measured.sent == {0: 50}
    assert measured.state_bytes == 24 + 8
    assert measured.save_bytes_per_s is None
    speed.value, speed.snapshot_every = 1000.0, 7  # a checkpoint came later, and an interval was chosen
    train(profilers, 1)
    again = profilers[0].job(groups=(), checkpoint_every=10).workers[1].measured
    assert again.save_bytes_per_s == 1000.0
    assert again.iteration_s == 1.0
    assert (measured.snapshot_every, again.snapshot_every) == (None, 7)


def test_the_profile_is_that_of_a_pipeline(profilers: list[Profiler]) -> None:
    with pytest.raises(UsageError, match="no profile yet: it takes 7 iterations"):
        profilers[0].read()
    train(profilers, ENOUGH)
    assert profilers[0].read().boundary_bytes == (100,)


def test_there_is_no_profile_without_a_pipeline(profilers: list[Profiler]) -> None:
    train(profilers, ENOUGH, pipeline=False)
    with pytest.raises(UsageError, match="no profile without a pipeline"):
        profilers[1].read()
