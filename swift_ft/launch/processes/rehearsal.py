"""Warms up a pre-forked worker while it waits for a job.

A new process pays for each page when it first touches it: the kernel maps and clears it, or copies what is
still the standby's. For a model of 4 million parameters that is 38,000 pages until the end of the first
iteration, 60 ms of the kernel's time. And torch sets much up at its first use. A spare has nothing else to
do until it is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from swift_ft.checkpoint.state_payload import pack, unpack
from swift_ft.host.heap import map_ahead
from swift_ft.host.pages import copy_shared
from swift_ft.launch.processes.worker import use_threads_of_environment


def rehearse(is_needed: Callable[[], bool]) -> None:
    """Make ready, and change nothing that a script could see.

    Args:
        is_needed: whether the job is there, and the rest is left out.
    """
    use_threads_of_environment()
    # An accelerator's torch looks for devices in a backward. And with several threads a parallel loop starts
    # them, which hangs for ever where a process before this one had some when it forked.
    host_only = not (torch.version.cuda or torch.version.hip or torch.version.xpu)
    if host_only and torch.get_num_threads() == 1 and not is_needed():
        _train()
    map_ahead(is_needed)
    copy_shared(is_needed)


def _train() -> None:
    """Train a toy twice, as workers do, and take its state over."""
    with torch.random.fork_rng(devices=[]):
        layers = nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        words = torch.zeros(2, 4, dtype=torch.int64)
        for _ in range(2):
            nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        set_model_state_dict(model, get_model_state_dict(model))
        optimizer.load_state_dict(unpack(pack(optimizer.state_dict())))
