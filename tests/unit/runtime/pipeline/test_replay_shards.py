"""Helpers are as many as the user says, or as compute at the same time."""

from __future__ import annotations

import os

import pytest
import torch

from swift_ft.config.run_config import RunConfig
from swift_ft.runtime.pipeline.replay_shards import most_shards

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("cores", "threads", "found"), [(1, 1, 2), (2, 1, 2), (6, 1, 6), (64, 1, 8), (16, 4, 4), (4, 8, 2)]
)
def test_no_more_than_cores_on_one_host(
    cores: int, threads: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert most_shards(RunConfig(machines=9), 8, CPU) == found


def test_machines_with_cores_of_their_own_or_gpus() -> None:
    assert most_shards(RunConfig(), 64, CPU) == 64
    assert most_shards(RunConfig(machines=9), 64, CUDA) == 64


def test_the_user_knows_better() -> None:
    for config in (RunConfig(helpers=5), RunConfig(helpers=5, machines=9)):
        assert most_shards(config, 8, CPU) == 6
        assert most_shards(config, 4, CPU) == 4
