"""Samples of microbatches, where pipelines that are replicas have unlike numbers of microbatches.

In an average of gradients each microbatch counts as much as any other one, so all need equally many samples.
A script that gives each pipeline an equal part of a batch, whatever its number of microbatches, would train
with another average, and no error would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from swift_ft.errors import UsageError

_NONE = -(1 << 62)


def sizes_of(inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> list[int]:
    """The most samples of a microbatch, and the fewest, negated: of inputs, then of targets.

    The greatest of each over all workers is what :func:`check_sizes` takes.

    Args:
        inputs: of each microbatch, a tuple of arguments; None where they are not known.
        targets: of each microbatch, likewise.
    """
    found = []
    for values in (inputs, targets):
        sizes = [*_sizes(values or ())]
        found += [max(sizes, default=_NONE), max((-size for size in sizes), default=_NONE)]
    return found


def _sizes(values: Sequence[Any]) -> Iterator[int]:
    for value in values:
        tensors = (
            one
            for one in (value if isinstance(value, tuple) else (value,))
            if isinstance(one, torch.Tensor) and one.dim()
        )
        if (first := next(tensors, None)) is not None:
            yield first.shape[0]


def check_sizes(greatest: Sequence[int], counts: Sequence[int]) -> None:
    """Whether all microbatches have equally many samples.

    Args:
        greatest: over all workers, of what :func:`sizes_of` has returned.
        counts: microbatches of each pipeline.

    Raises:
        UsageError: they have not.
    """
    for most, fewest in zip(greatest[::2], greatest[1::2], strict=True):
        if most != _NONE and most != -fewest:
            raise UsageError(
                f"The pipelines have {', '.join(map(str, counts))} microbatches, of {-fewest} to {most} "
                "samples. Each microbatch counts as much as any other one, so all need equally many: deal "
                "batches by swift_ft.data.GlobalBatches in Session(state), or by model.counts.",
                alike=True,  # all workers have the same numbers
            )
