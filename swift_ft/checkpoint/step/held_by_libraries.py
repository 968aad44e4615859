"""Data sets and functions of a script that a library's object holds: a loader, a scheduler, a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.kinds import MOST_ELEMENTS

_PASSING_ON = (
    *("torch.utils.data.", "torchdata.", "torchvision.", "swift_ft.data.", "torch.optim.lr_scheduler"),
    "torch.distributed.pipelining.schedules",
)
"""Names of libraries, as far as modules begin with them, whose objects lead to data sets and functions of a
script."""
OF_SCHEDULERS = frozenset({"lr_lambdas", "schedulers", "scale_fn_custom"})
"""Attributes of schedulers, without an underscore before them, that hold functions and what calls some."""
_HOLDS_OF_SCRIPT = OF_SCHEDULERS | frozenset(
    {
        *("loader", "source", "order", "dataset", "datasets", "sampler", "batch_sampler", "options"),
        *("collate_fn", "transform", "target_transform", "transforms", "lambd"),
        "loss_fn",  # of a pipeline's schedule
    }
)
"""Their attributes that do, an underscore before them or not."""


def passed_on(value: Any) -> Iterator[tuple[str, Any]]:
    """The script's data sets and functions that a library's object holds to make samples or rates.

    A list of them comes as a whole: a step may add to it.
    """
    if not type(value).__module__.startswith(_PASSING_ON) or isinstance(value, type):
        return
    for name, one in getattr(value, "__dict__", {}).items():
        if name.lstrip("_") not in _HOLDS_OF_SCRIPT:
            continue
        several = isinstance(one, tuple | dict) and len(one) <= MOST_ELEMENTS
        inner = content_in(one) if several else (one,)
        yield from ((f"{name}[{i}]" if several else name, part) for i, part in enumerate(inner))
