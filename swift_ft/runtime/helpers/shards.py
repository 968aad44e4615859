"""Among how many workers a replay is divided, where the user does not say so."""

from __future__ import annotations

import os

import torch

from swift_ft.config import RunConfig

__all__ = ["most_shards"]


def most_shards(config: RunConfig, microbatches: int, device: torch.device) -> int:
    """The most workers that a replay is divided among, the replaced one and its helpers.

    Helpers cost bytes and copies, and pay only where each computes at the same time as the others. So workers
    that compute on the cores of one host are no more than these cores, but two at least: one waits while the
    other updates. On two cores, three helpers took 1.15 times as long as one.

    Args:
        config: the run's; ``helpers`` is the user's word.
        microbatches: in an iteration; no worker has less than one.
        device: of the stages.
    """
    if config.helpers is not None:
        return min(microbatches, 1 + config.helpers)
    if config.machines is None or device.type != "cpu":  # cores or devices of their own
        return microbatches
    return min(microbatches, max(2, len(os.sched_getaffinity(0)) // torch.get_num_threads()))
