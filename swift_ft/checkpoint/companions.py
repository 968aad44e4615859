"""Objects that change along with the training: schedulers, gradient scalers, averages of the model.

Of torch, or of another library that names them as usual: nothing but their classes tells what they are.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from swift_ft.torch_core.tensors import tensors_in, version_of

_STEPS = "steps with the optimizer"
_AVERAGES = re.compile(r"EMA|Ema([A-Z_]|$)|(Moving|Exponential)Average|Averaged?Model")
"""Names of classes: ``ModelEma``, ``EMAModel``, ``ExponentialMovingAverage``."""


class Companion:
    """One of them, and its state at a moment.

    Args:
        part: the object. It is not kept alive.
    """

    def __init__(self, part: Any) -> None:
        self._part = weakref.ref(part)
        self._before = _state_of(part)

    def follows(self, part: Any) -> bool:
        """Whether this is of an object, and not of an earlier one in the same place."""
        return self._part() is part

    @property
    def why_wanted(self) -> str:
        """The end of the error that is raised if the part has changed: the reason, and the remedy."""
        kind = type(self._part())
        how, name = ("is updated with the model", "ema") if _is_average(kind) else (_STEPS, "scheduler")
        return (
            f"{_article(kind.__name__)} {kind.__name__} {how} and is not in Session(state): pass it too, "
            f'as in Session({{..., "{name}": {name}}}, ...).'
        )

    def has_stepped(self) -> bool:
        """Whether it has changed since."""
        part = self._part()
        return part is not None and _state_of(part) != self._before


def companions_of(optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> list[Any]:
    """Looks through the whole process, which takes some hundredths of a second.

    Args:
        optimizers: whose schedulers are wanted.
        models: whose averages are wanted.

    Returns:
        Schedulers of these optimizers, averages of these models or of modules in them, all gradient scalers.
    """
    wanted = {id(optimizer) for optimizer in optimizers}
    # An optimizer does not know its schedulers, so only the collector can find them.
    things = gc.get_objects()
    # Classes first: they are few, and objects are many.
    kinds = {kind for kind in {*map(type, things)} if is_companion(kind)}
    found, averages = [], []
    for thing in (thing for thing in things if type(thing) in kinds):
        if _is_average(type(thing)):
            averages.append(thing)
        elif isinstance(thing, GradScaler) or any(id(value) in wanted for value in values_of(thing)):
            found.append(thing)
    # By shapes, since an average need not refer to its model.
    if averages:
        shapes = {_shapes(inner.parameters()) for model in models for inner in model.modules()}
        found += [average for average in averages if _shapes(_averaged_in(average)) in shapes - {()}]
    return found


def is_companion(kind: type) -> bool:
    """Whether objects of a class are gradient scalers, schedulers, or averages of a model."""
    if issubclass(kind, LRScheduler | GradScaler) or _is_average(kind):
        return True
    methods = ("step", "state_dict", "load_state_dict")
    return any("Scheduler" in base.__name__ for base in kind.__mro__) and _has(kind, *methods)


def reachable(parts: Iterable[Any], of_kind: Any) -> list[Any]:
    """Parts, and the objects of a kind that they have as attributes, or in lists, tuples and dictionaries."""
    found: dict[int, Any] = {}
    todo = list(parts)
    while todo:
        part = todo.pop()
        if id(part) not in found:
            found[id(part)] = part
            todo += [value for value in values_of(part) if of_kind(type(value))]
    return [part for part in found.values() if of_kind(type(part))]


def values_of(thing: Any) -> Iterator[Any]:
    """The attributes of an object, and what is in those that are lists, tuples or dictionaries."""
    for value in list(getattr(thing, "__dict__", {}).values()):
        if isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, dict):
            yield from list(value.values())
        else:
            yield value


def averaged_tensors(average: Any) -> list[torch.Tensor]:
    """All tensors of an average, its counters included; none of anything else."""
    if not _is_average(type(average)):
        return []
    if isinstance(average, nn.Module):
        return [*average.parameters(), *average.buffers()]
    return [*tensors_in(dict(vars(average)))]


def _averaged_in(average: Any) -> Iterable[torch.Tensor]:
    """The averages of parameters, in the model's own order."""
    return average.parameters() if isinstance(average, nn.Module) else tensors_in(dict(vars(average)))


def _is_average(kind: type) -> bool:
    if issubclass(kind, AveragedModel):
        return True
    return bool(_AVERAGES.search(kind.__name__)) and _has(kind, "state_dict", "load_state_dict")


def _has(kind: type, *methods: str) -> bool:
    return all(any(method in vars(base) for base in kind.__mro__) for method in methods)


def _shapes(tensors: Iterable[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors)


def _article(name: str) -> str:
    return "An" if name[0] in "AEIO" else "A"


def _state_of(part: Any) -> Any:
    if _is_average(type(part)):  # without a copy to the host
        return [(id(tensor), version_of(tensor)) for tensor in averaged_tensors(part)]
    return repr(part.state_dict())
