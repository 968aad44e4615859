"""Random numbers that what loads a sample may draw, without disturbing those of the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swift_ft.determinism import host_random_state, seed_host, set_host_random_state


@contextmanager
def random_numbers_of(seed: int) -> Iterator[None]:
    """Within the block, the host's random numbers (torch, Python, NumPy) are those of a 63-bit seed."""
    torch_state, host = torch.get_rng_state(), host_random_state()
    draw_from(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        set_host_random_state(host)


def draw_from(seed: int) -> None:
    """From now on, the host's random numbers are those of a 63-bit seed."""
    torch.default_generator.manual_seed(seed)
    seed_host(seed)
