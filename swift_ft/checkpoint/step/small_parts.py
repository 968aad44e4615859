"""Small parts of the state whose values go back into the very objects that held them.

Two things put a part back: its own ``load_state_dict``, and the note of the script's variables, which gives
attributes and dictionaries the objects of before. A ``load_state_dict`` that binds new tensors has put the
right values into these, and not into those that are bound again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from swift_ft.checkpoint.step.counted import is_counted
from swift_ft.checkpoint.step.kinds import FIXED_EXACTLY
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.torch_core.shards import local, note_changed
from swift_ft.torch_core.tensors import same_parts, same_values, storage_id, write_back
from swift_ft.undo.snapshot import Snapshot

_Path = tuple[Any, ...]


class LoadedParts:
    """Small parts that have just loaded what was saved. Make it before the script's variables are put back.

    Args:
        state: its small parts; tensors of its models and optimizers are put back in other ways.
        saved: what each part has loaded, by name.
    """

    def __init__(self, state: TrainingState, saved: Mapping[str, Any]) -> None:
        self._parts = {name: (part, saved[name]) for name, part in state.small.items() if name in saved}
        large = (*state.tensors(), *(parameter for _, parameter in state.parameters))
        self._large = {storage_id(local(tensor)) for tensor in large}
        self._wrong = {name: {*self._differing(*one)} for name, one in self._parts.items()}

    def put_right(self) -> None:
        """The script's variables are put back: write what was saved where they hold something else.

        A part that has copied what it gave out, so that nothing can be written to, loads it once more.
        """
        for name, (part, saved) in self._parts.items():
            # A loader's place stays where it is, and tells so as it loads.
            own = type(part).__module__.partition(".")[0] == __name__.partition(".")[0]
            for path, (now, before) in self._differing(part, saved).items():
                if not (own and path in self._wrong[name]) and not is_counted(id(now)):
                    _write(now, before)
            if self._differing(part, saved).keys() - self._wrong[name]:
                part.load_state_dict(copy.deepcopy(saved))

    def _differing(self, part: Any, saved: Any) -> dict[_Path, tuple[Any, Any]]:
        """Values that a part has now beside those that were saved, if these are not alike."""
        now = dict(_values_in(part.state_dict()))
        return {
            path: (now.get(path), before)
            for path, before in _values_in(saved)
            if not self._is_large(now.get(path)) and not _same(now.get(path), before)
        }

    def _is_large(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and storage_id(local(value)) in self._large


def _values_in(value: Any, at: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Tensors, arrays and plain values in containers, however deep, with their paths."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values_in(inner, (*at, key))
    elif isinstance(value, list | tuple | deque):
        for number, inner in enumerate(value):
            yield from _values_in(inner, (*at, number))
    elif isinstance(value, torch.Tensor):
        if not value.is_meta and not is_lazy(value):
            yield at, value
    elif isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            yield at, value
    elif type(value) in FIXED_EXACTLY or isinstance(value, bytearray):
        yield at, value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        here = local(one)  # to compare shards communicates
        return same_parts(here, local(other).to(here.device))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return same_values(one, other, incomparable=True)


@torch.no_grad()
def _write(now: Any, before: Any) -> None:
    """Give a tensor or an array of the same form the values of another one."""
    if isinstance(now, np.ndarray) and isinstance(before, np.ndarray):
        form = before.dtype, before.shape, True
        if (now.dtype, now.shape, now.flags.writeable) == form:
            now[...] = before
        return
    if not (isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor)):
        return
    here, values = local(now), local(before)
    if (here.layout, here.shape, here.dtype) == (values.layout, values.shape, values.dtype):
        if here.layout == torch.strided:
            write_back(here, values.to(here.device))
        else:
            Snapshot(here, values).restore()
        note_changed(now)
