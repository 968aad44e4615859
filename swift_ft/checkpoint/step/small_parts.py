"""Small parts of the state whose values go back into the very tensors that held them.

Two things put a part back: its own ``load_state_dict``, and then the note of the script's variables, which
gives attributes and dictionaries the objects of before. A ``load_state_dict`` that binds new tensors has put
the right values into these, and not into those that are bound again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from swift_ft.checkpoint.plain_classes import attributes
from swift_ft.checkpoint.step.containers import items_in
from swift_ft.checkpoint.step.counted import is_counted
from swift_ft.checkpoint.step.kinds import MOST_ELEMENTS, is_fixed, is_reference
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.torch_core.shards import local, note_changed
from swift_ft.torch_core.tensors import storage_id, write_back

_MOST = 10_000
"""Values of a part that are looked at: what else it refers to may be without end."""

_Path = tuple[object, ...]
_Leaf = torch.Tensor | np.ndarray[Any, Any]


class LoadedParts:
    """Small parts that have just loaded what was saved. Make it before the script's variables are put back.

    Nothing of a part is called: it may communicate, draw numbers or count its calls.

    Args:
        state: its small parts; its models and optimizers are put back in other ways.
    """

    def __init__(self, state: TrainingState) -> None:
        own = __name__.partition(".")[0]
        # Of this package: the place of a loader stays where it is, and tells so as it loads.
        self._parts = [one for one in state.small.values() if type(one).__module__.partition(".")[0] != own]
        self._others = {id(one) for one in (*state.modules.values(), *state.optimizers.values())}
        large = (*state.tensors(), *(parameter for _, parameter in state.parameters))
        self._large = {storage_id(local(tensor)) for tensor in large}
        self._loaded = [self._leaves_of(part) for part in self._parts]

    def put_right(self) -> None:
        """The script's variables are put back: what is bound again gets the values of what was loaded."""
        for part, loaded in zip(self._parts, self._loaded, strict=True):
            for path, now in self._leaves_of(part).items():
                if (one := loaded.get(path)) is not None and one is not now and not is_counted(id(now)):
                    _write(now, one)

    def _leaves_of(self, part: Any) -> dict[_Path, _Leaf]:
        """The tensors and arrays that a part holds, however deep, by the way that leads there."""
        found: dict[_Path, _Leaf] = {}
        seen = {*self._others}
        todo: deque[tuple[_Path, Any]] = deque([((), part)])
        while todo and len(seen) < _MOST + len(self._others):
            path, value = todo.popleft()
            if is_fixed(value) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                if not value.is_meta and not is_lazy(value) and storage_id(local(value)) not in self._large:
                    found[path] = value
            elif isinstance(value, np.ndarray):
                if not value.dtype.hasobject:
                    found[path] = value
            else:
                todo.extend(((*path, at), inner) for at, inner in _held_by(value))
        return found


def _held_by(value: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(value, dict | list | tuple | deque) and len(value) <= MOST_ELEMENTS:
        yield from enumerate(value) if isinstance(value, tuple) else items_in(value)
    if not isinstance(value, Optimizer) and not is_reference(value):
        yield from attributes(value).items()


@torch.no_grad()
def _write(now: _Leaf, loaded: _Leaf) -> None:
    """Give a tensor or an array the values of another one of the same form."""
    if isinstance(now, np.ndarray) and isinstance(loaded, np.ndarray):
        if (now.dtype, now.shape) == (loaded.dtype, loaded.shape) and now.flags.writeable:
            now[...] = loaded
    elif isinstance(now, torch.Tensor) and isinstance(loaded, torch.Tensor):
        here, values = local(now), local(loaded)
        same_form = (here.layout, here.shape, here.dtype) == (values.layout, values.shape, values.dtype)
        if same_form and here.layout == torch.strided:
            write_back(here, values.detach().to(here.device))
            note_changed(now)
        elif same_form and here.is_sparse:
            here.copy_(values.detach().to(here.device))
            note_changed(now)
