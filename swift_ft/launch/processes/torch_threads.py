"""With how many threads torch computes in a worker."""

from __future__ import annotations

import os

import torch


def use_threads_of_environment() -> None:
    """As many as ``OMP_NUM_THREADS`` says: torch was imported before that was set, in the standby."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
