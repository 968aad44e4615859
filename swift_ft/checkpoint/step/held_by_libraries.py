"""Data sets and functions of a script that only a library's object holds, such as a loader or a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.kinds import MOST_ELEMENTS

_PASSING_ON = (
    *("torch.utils.data.", "torchdata.", "torchvision.", "swift_ft.data.", "torch.optim.lr_scheduler"),
)
"""Names of libraries, as far as modules begin with them, whose objects lead to data sets and functions of a
script."""
_HOLDS_OF_SCRIPT = frozenset(
    {
        *("loader", "source", "order", "dataset", "datasets", "sampler", "batch_sampler", "options"),
        *("collate_fn", "transform", "target_transform", "transforms", "lambd"),
        *("lr_lambdas", "schedulers", "scale_fn_custom"),
    }
)
"""Their attributes that do, an underscore before them or not."""


def passed_on(value: Any) -> Iterator[tuple[str, Any]]:
    """The script's data sets and functions that a library's object holds to make samples or rates.

    A list of them comes as a whole: a step may add to it.
    """
    if not type(value).__module__.startswith(_PASSING_ON) or isinstance(value, type):
        return
    for name, one in held_by(value):
        several = isinstance(one, tuple | dict) and len(one) <= MOST_ELEMENTS
        inner = content_in(one) if several else (one,)
        yield from ((f"{name}[{i}]" if several else name, part) for i, part in enumerate(inner))


def held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that have them, also of an object of a class that derives from a library's."""
    attributes = getattr(value, "__dict__", {})
    yield from ((name, one) for name, one in attributes.items() if name.lstrip("_") in _HOLDS_OF_SCRIPT)
