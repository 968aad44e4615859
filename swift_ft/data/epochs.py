"""Samplers and data sets that are told which epoch begins."""

from __future__ import annotations

from typing import Any


def set_epoch(source: Any, epoch: int) -> None:
    """Tell a sampler, or what a loader draws its samples from, which epoch begins."""
    for place in (source, *samplers_of(source), getattr(source, "dataset", None)):
        method = getattr(place, "set_epoch", None)
        if method is not None:
            method(epoch)
            return


def samplers_of(loader: Any) -> tuple[Any, ...]:
    """A loader's samplers; None for each that it does not have."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
