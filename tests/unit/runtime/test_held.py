"""Which workers count as replicas of each other: those that say that they hold the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.runtime.attachments import held_by


def held(
    *,
    stages: tuple[int, ...] = (0,),
    ranks: int = 0,
    replicas: tuple[int, ...] = (),
    world_size: int = 4,
    shards: str = "",
) -> tuple[str, ...]:
    """What worker 1 says.

    Args:
        stages: on it.
        ranks: of its pipeline; 0 without one.
        replicas: the workers of its DDP group; empty without one.
        world_size: number of workers.
        shards: that are on it.
    """
    pipeline: Any = SimpleNamespace(
        shared_layers=None, stages=stages, holders=lambda: {rank: rank for rank in range(ranks)}
    )
    ddp: Any = SimpleNamespace(
        attached=bool(replicas),
        sharded=bool(shards),
        count=len(replicas) or 1,
        first=min(replicas, default=1),
    )
    return held_by(pipeline if ranks else None, ddp, world_size, shards=shards)


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"ranks": 4, "stages": (1,)}, ("stage 1",)),
        ({"ranks": 4, "stages": (1, 5)}, ("stage 1", "stage 5")),
        ({"ranks": 2, "replicas": (1, 3)}, ("stage 0",)),
        ({"replicas": (0, 1, 2, 3)}, ("the model",)),
        ({"replicas": (1, 3), "shards": "shard 1 of 2"}, ("the model, shard 1 of 2",)),
        ({"ranks": 2, "replicas": (1, 3), "shards": "shard 1 of 2"}, ("stage 0, shard 1 of 2",)),
        ({}, ()),
    ],
)
def test_a_whole_part_has_its_own_name(how: dict[str, Any], names: tuple[str, ...]) -> None:
    assert held(**how) == names


@pytest.mark.parametrize(
    ("how", "names"),
    [
        # Tensor parallelism in a pipeline of two: another worker has the other part of the stage.
        ({"ranks": 2}, ("stage 0's part on worker 1",)),
        # The same, and each part has a replica.
        ({"ranks": 2, "replicas": (1, 5), "world_size": 8}, ("stage 0's part on worker 1",)),
        # Tensor parallelism and DDP, without a pipeline.
        ({"replicas": (1, 3)}, ("the model's part on worker 1",)),
    ],
)
def test_parts_of_a_stage_are_no_replicas(how: dict[str, Any], names: tuple[str, ...]) -> None:
    """They had the same name: their states were compared with each other, and only one was saved."""
    assert held(**how) == names
