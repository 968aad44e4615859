"""The variables of a script at one moment, and the way back to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from swift_ft.checkpoint.step.caches import Remembered
from swift_ft.checkpoint.step.counted import counted_in, is_counted
from swift_ft.checkpoint.step.kinds import is_copied, is_understood
from swift_ft.checkpoint.step.leaves import MOST_BYTES, Leaf, OfGraph, Uncopied
from swift_ft.checkpoint.step.namespaces import MISSING, Namespace
from swift_ft.checkpoint.step.reach import content_of
from swift_ft.program.loop_frame import EPOCHS, loop_frames, set_variables
from swift_ft.program.read_later import read_later
from swift_ft.torch_core.tensors import parts_bytes
from swift_ft.units import format_bytes

OPAQUE: Any = object()
"""In the place of a value that is of no kind that could be put back."""
OF_LOOP_BYTES = 2**16
"""Larger tensors and arrays that the loop's own variables hold are batches and results, as a rule: they are
noted where a step reads them before it sets others."""


@dataclass
class NotedVariables:
    """The variables of a script at one moment.

    Attributes:
        namespaces: of the objects, classes, functions and files that were found.
        slots: namespaces, and the names of their variables.
        values: one for each slot.
        cells: what is in cells.
        loop: variables of the functions that run the loop, by function and name.
        codes: the code of these functions.
        leaves: values that change in place, by ``id()``.
        flags: whether parameters require gradients.
        large: tensors in attributes of modules that are too large for a copy, by name.
        caches: what functions remember.
    """

    namespaces: list[Namespace]
    slots: list[tuple[Namespace, str]]
    values: list[Any]
    cells: list[tuple[CellType, Any]]
    loop: dict[tuple[str, str], Any]
    codes: dict[str, CodeType]
    leaves: dict[int, Leaf]
    flags: list[tuple[nn.Parameter, bool]] = field(default_factory=list)
    large: dict[str, torch.Tensor] = field(default_factory=dict)
    caches: list[Remembered] = field(default_factory=list)

    def changed_uncopied(self) -> list[Any]:
        """Tensors and arrays that have changed for the first time since, of which there is no copy."""
        found = {number: leaf for number, leaf in self.leaves.items() if isinstance(leaf, Uncopied)}
        changed = (leaf.value() for number, leaf in found.items() if leaf.changed and not is_counted(number))
        return [one for one in changed if one is not None]

    def unaccounted(self) -> list[str]:
        """As :meth:`changed_uncopied`, in words."""
        return [in_words(one) for one in self.changed_uncopied()]

    def put_back(self) -> None:
        """As they were. What is of a kind that nothing is known of stays as it is."""
        # A loader may have been found to count in more since this was noted.
        here = {id(one): one for one in (*self.namespaces, *(namespace for namespace, _ in self.slots))}
        known = {number: counted_in(one.owner) for number, one in here.items()}
        for (namespace, name), value in zip(self.slots, self.values, strict=True):
            if name in known[id(namespace)]:
                continue
            known[id(namespace)].add(name)
            now = namespace.variables.get(name, MISSING)
            if now is value or value is OPAQUE or not _gives_way(now):
                continue
            namespace.write(name, _taken_back(value))
        for namespace in self.namespaces:
            for name in set(namespace.names()) - known[id(namespace)]:
                if namespace.may_lose(name) and is_understood(namespace.variables[name]):
                    namespace.write(name, MISSING)
        for cell, value in self.cells:
            if content_of(cell) is not value and _gives_way(content_of(cell)):
                cell.cell_contents = _taken_back(value)
        for function, frame in loop_frames(self.codes.get(EPOCHS)).items():
            if frame.f_code is not self.codes.get(function):
                continue  # the function of then has returned
            now = frame.f_locals
            changed = {
                name: _taken_back(value)
                for (of, name), value in self.loop.items()
                if of == function and (present := now.get(name, MISSING)) is not value and _gives_way(present)
            }
            set_variables(frame, changed)
        for number, leaf in self.leaves.items():
            if not is_counted(number):
                leaf.put_back()
        for cache in self.caches:
            cache.put_back()
        for parameter, flag in self.flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def keep_changed(self) -> None:
        """From now on, put back only what has changed until now. Later changes are others' own."""
        noted = zip(self.slots, self.values, strict=True)
        changed = [(slot, value) for slot, value in noted if _is_other(_now(slot), value)]
        known = {(id(namespace), name) for namespace, name in self.slots}
        changed += [
            ((namespace, name), MISSING)
            for namespace in self.namespaces
            for name in namespace.names()
            if (id(namespace), name) not in known and namespace.may_lose(name)
        ]
        self.namespaces = []
        self.slots, self.values = [slot for slot, _ in changed], [value for _, value in changed]
        self.cells = [(cell, value) for cell, value in self.cells if _is_other(content_of(cell), value)]
        loop = variables_in(loop_frames(self.codes.get(EPOCHS)))
        self.loop = {
            place: value for place, value in self.loop.items() if _is_other(loop.get(place, MISSING), value)
        }
        self.leaves = {number: leaf for number, leaf in self.leaves.items() if leaf.changed}
        self.caches = [one for one in self.caches if one.changed]
        self.flags = [(one, flag) for one, flag in self.flags if one.requires_grad != flag]
        self.large = {}


def in_words(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """A tensor or an array as a user knows it."""
    kind = type(value).__name__.lower()
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:  # torch counts no bytes of it
            kind = f"{str(value.layout).removeprefix('torch.')} {kind}"
        return f"{kind} of {format_bytes(parts_bytes(value))}"
    return f"{kind} of {format_bytes(value.nbytes)}"


def variables_in(frames: Mapping[str, FrameType]) -> dict[tuple[str, str], Any]:
    """The variables of the functions that run the loop, by function and name: no batches among them."""
    return {
        (function, name): value
        for function, frame in frames.items()
        if frame.f_locals is not frame.f_globals  # a module's variables are a namespace
        for name, value in frame.f_locals.items()
        if is_understood(value) and (not is_large_of_loop(value) or name in read_later(frame))
    }


def is_large_of_loop(value: Any) -> bool:
    """Whether it is a tensor or an array that had better not be copied with each batch."""
    if isinstance(value, torch.Tensor):
        return not is_copied(value, OF_LOOP_BYTES)
    return isinstance(value, np.ndarray) and value.nbytes > OF_LOOP_BYTES


def noted_value(value: Any, *, large: bool = False) -> Any:
    """A value, or what stands for it in a note.

    Args:
        value: a variable has it.
        large: copy a tensor of any size that has its graph.
    """
    if value is not MISSING and not is_understood(value):
        return OPAQUE
    return understood_value(value, large=large)


def understood_value(value: Any, *, large: bool = False) -> Any:
    """As :func:`noted_value`, of a value that is understood, as those of :func:`variables_in` are."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        may = value.layout == torch.strided if large else is_copied(value, MOST_BYTES)
        return OfGraph(value) if may else OPAQUE
    return value


def noted_cells(cells: Iterable[tuple[CellType, Any]], *, large: bool = False) -> list[tuple[CellType, Any]]:
    """Cells and what stands in a note for their values."""
    noted = [(cell, noted_value(value, large=large)) for cell, value in cells if value is not MISSING]
    return [(cell, value) for cell, value in noted if value is not OPAQUE]


def _now(slot: tuple[Namespace, str]) -> Any:
    namespace, name = slot
    return namespace.variables.get(name, MISSING)


def _gives_way(now: Any) -> bool:
    """Whether what a variable holds may be replaced by what it held: also nothing, after a ``del``."""
    return now is MISSING or is_understood(now)


def _is_other(now: Any, noted: Any) -> bool:
    """Whether a variable holds something else than it did. A tensor with its graph counts as another one."""
    return now is not noted and noted is not OPAQUE


def _taken_back(noted: Any) -> Any:
    return noted.tensor() if isinstance(noted, OfGraph) else noted
