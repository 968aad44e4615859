"""All that a script keeps in variables, at the beginning of a step: attributes, counters, generators, flags.

A step is a transaction: what the script changes in it, or around it, is put back before it is repeated.
That is not a list of names. All is noted that a step can reach (:mod:`swift_ft.checkpoint.step.reach`): small
values by copy, all others by reference.
"""

from __future__ import annotations

import logging
import re
import sys
import weakref
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from swift_ft.checkpoint.step.caches import Remembered
from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.counted import number_of_counted
from swift_ft.checkpoint.step.kinds import (
    BY_REFERENCE,
    CONTAINERS,
    FIXED_EXACTLY,
    GENERATORS,
    MOST_ELEMENTS,
    is_namespace,
)
from swift_ft.checkpoint.step.leaves import FEW_BYTES, MOST_BYTES, MOST_NOTED, Leaves, Uncopied
from swift_ft.checkpoint.step.noted import (
    OF_LOOP_BYTES,
    OPAQUE,
    NotedVariables,
    is_large_of_loop,
    noted_cells,
    noted_value,
    understood_value,
    variables_in,
)
from swift_ft.checkpoint.step.reach import (
    MISSING,
    Namespace,
    Reach,
    content_of,
    leads_nowhere,
    path_of_file,
    reach,
)
from swift_ft.checkpoint.step.results import HeavyContainers, holds_results
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.program.inner_imports import imported_within
from swift_ft.program.loop_frame import EPOCHS, LOOP, PASSES_ON, loop_frames
from swift_ft.program.own_code import is_own_module
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import memory_of, same_bits, storage_id, storage_names, tensors_in

_logger = logging.getLogger(__name__)

_VARIABLE, _GLOBAL = "(variable)", "(global)"
"""Before the name of a variable that is that of a part of the state, which is something else, and before that
of a file's variable where the function that runs the loop has one of its own by that name."""
_MOST_LOOKED_THROUGH = 2**14
"""Elements of all containers of more than 64 that are looked through in each step for new ones."""
_FEW = 64
_MANY_NEW = 32
"""New things in containers that had better be found by a look, which finds them once for all steps."""
_MOST_NEW = 64
"""Of them that a step looks into: each takes ten or twenty microseconds."""
_LOOKS_APART = 16
"""Steps between two looks for that reason."""
_FIRST_NOTES = 3
_DEEPEST = 3
"""Containers in a container of many elements."""
_MOST_MADE_SINCE = 10_000
"""Elements of new containers, as a batch may be, that are looked through in each step."""


class ScriptVariables:
    """Finds the variables of a script, and notes them.

    Args:
        state: what the session protects: what it reaches is noted, and its own tensors are not.

    Attributes:
        state: what the session protects.
        slots: the variables of all namespaces that were found.
        epochs: the code that runs the script's loop over epochs; None if it has none.
        unnoted: containers that were too large at the last note, by ``id()``.
        in_no_module: parameters that optimizers have and modules have not, as of the last look.
    """

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.epochs: CodeType | None = None
        self.unnoted: set[int] = set()
        self._reach = Reach([], [], [], {})
        self.slots: list[tuple[Namespace, str]] = []
        self.in_no_module: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._counted = 0  # variables in which loaders count, at the last look
        self._looked_through: list[Any] = []  # containers whose new elements are found in each step
        self._heavy = HeavyContainers()  # others, with large tensors
        self._modules_of_loop = 0  # that run the loop: the last namespaces
        self._first_of_loop = 0  # the first slot of these
        self._steps_since_look = self._new = 0
        # Storages of large state, which is put back in other ways, as of the last look: without gradients.
        self._protected: dict[int, object] = {}
        self._partly: set[int] = set()  # those of them that small parts save a part of alone
        self._gradients: list[int] | None = (
            None  # addresses, as of the first need since the last look or note
        )
        self._of_optimizers: set[int] = set()  # containers, by id(), as of the last look
        self._parameters: set[int] = set()  # those of the state, by id(), as of the last look or note
        self._said_crowded = False
        self._notes = 0
        self._beyond: list[Uncopied] = []  # of the last note
        self._changing: dict[int, weakref.ref[Any]] = {}  # those of them that have changed, by id()

    @property
    def cells(self) -> list[tuple[str, CellType]]:
        """The cells that functions share with the function that they were made in, by path."""
        return self._reach.cells

    @property
    def namespaces(self) -> Sequence[Namespace]:
        """All that were found."""
        return self._reach.namespaces

    @property
    def paths(self) -> Iterator[str]:
        """The paths of all namespaces that were found."""
        return (namespace.path for namespace in self._reach.namespaces)

    def note(
        self, parameters: Collection[nn.Parameter], *, whole: bool = True, large: bool = False
    ) -> NotedVariables:
        """The present values of all variables of the objects that were found.

        Args:
            parameters: whose flags are noted, too.
            whole: copy as well what has never changed, however much there is.
            large: note as well what is too large for the copies of each step: by copy if it is known to
                change, else so that a change of it is seen.
        """
        if parameters:
            self._parameters = {*map(id, parameters), *map(id, self.in_no_module)}
        self._gradients = None
        self._steps_since_look += 1
        grown = self._new > _MANY_NEW and self._steps_since_look >= _LOOKS_APART
        if grown or self._counted != number_of_counted():
            self.look()
        if self._sizes != [len(namespace.variables) for namespace in self._reach.namespaces]:
            self._note_slots()
        frames = loop_frames(self.epochs)
        loop = variables_in(frames)
        self._heavy.let_go()  # frames give up earlier values only as they are asked for the present ones
        slots, raw = self.slots, [namespace.variables.get(name, MISSING) for namespace, name in self.slots]
        first = self._first_of_loop
        if results := {id(value) for value in (*loop.values(), *raw[first:]) if holds_results(value)}:
            loop = {place: value for place, value in loop.items() if id(value) not in results}
            raw[first:] = [OPAQUE if id(value) in results else value for value in raw[first:]]
        others = [index for index, value in enumerate(raw) if type(value) not in BY_REFERENCE]
        seen = self._reach.seen
        functions = (one for one in raw if type(one) in (FunctionType, type) and id(one) not in seen)
        late, inner = self._made_since([*(raw[index] for index in others), *functions, *loop.values()])
        if late.namespaces:
            slots = [
                *slots,
                *((namespace, name) for namespace in late.namespaces for name in namespace.names()),
            ]
            raw += [namespace.variables[name] for namespace, name in slots[len(raw) :]]
            others = [index for index, value in enumerate(raw) if type(value) not in BY_REFERENCE]
        cells = [(cell, content_of(cell)) for _, cell in [*self.cells, *late.cells]]
        values = raw.copy()
        for index in others:
            values[index] = noted_value(raw[index], large=large)
        leaves = self._new_leaves(whole=whole, large=large)
        in_place = [*(raw[index] for index in others), *(value for _, value in cells), *self._reach.leaves]
        in_place += [one for one in self._heavy.containers if id(one) not in results]
        self._copy([*in_place, *inner], MOST_BYTES, leaves)
        self._copy([*loop.values(), *late.leaves], OF_LOOP_BYTES, leaves)
        large_of_loop = [value for value in loop.values() if is_large_of_loop(value)]
        self._copy(large_of_loop, MOST_BYTES, leaves, once_changed=True)
        of_modules = self._large_of([(*slots[index], raw[index]) for index in others])
        if large:
            apart = {*map(id, of_modules.values())}
            held = [*in_place, *inner, *loop.values(), *late.leaves]
            self._copy_large([one for one in held if id(one) not in apart], leaves)
        else:
            self.unnoted = leaves.unnoted
        self._beyond = leaves.beyond
        self._heavy.noted(leaves.by_number)
        return NotedVariables(
            namespaces=[*self._reach.namespaces, *late.namespaces],
            slots=slots,
            values=values,
            cells=noted_cells(cells, large=large),
            loop={place: understood_value(value, large=large) for place, value in loop.items()},
            codes={function: frame.f_code for function, frame in frames.items()},
            leaves=leaves.by_number,
            large=of_modules,
            flags=[(parameter, parameter.requires_grad) for parameter in parameters],
            caches=[*map(Remembered, (*self._reach.caches, *late.caches))],
        )

    def _new_leaves(self, *, whole: bool, large: bool) -> Leaves:
        """In the first notes all is copied, to see what changes: where there is much, only that later on."""
        self._notes += 1
        # Not by callbacks: an exception of the script's signal handler would be lost in one.
        self._changing = {number: one for number, one in self._changing.items() if one() is not None}
        changed = (one.value() for one in self._beyond if one.changed)
        self.note_changing(value for value in changed if value is not None)
        known = None if whole or self._notes <= _FIRST_NOTES else self._changing
        return Leaves(known, any_length=large)

    def note_changing(self, values: Iterable[torch.Tensor | np.ndarray[Any, Any]]) -> None:
        """Tensors and arrays were seen to change in place: notes that may copy them do so from now on."""
        self._changing.update((id(value), weakref.ref(value)) for value in values)

    def _made_since(self, values: Iterable[Any]) -> tuple[Reach, list[Any]]:
        """Things that the script has made since the last look, such as a new meter, and what is in them.

        Returns:
            All that was found, and the leaves among it that containers of before hold.
        """
        seen, found = self._reach.seen, Reach([], [], [], {})
        inner: list[Any] = []
        for one in (*self._looked_through, *_few_enough(self._heavy.containers)):
            content = content_in(one)
            if not FIXED_EXACTLY.issuperset(map(type, content)) and len(one) <= MOST_ELEMENTS:
                inner += [e for e in content if id(e) not in seen and not leads_nowhere(type(e))]
        self._new = len(inner)
        if inner:
            found = reach([("", inner[:_MOST_NEW])], seen, _MOST_MADE_SINCE)
        held = [*found.leaves]
        if new := [value for value in values if _leads_on(value, seen)]:
            known = ChainMap(found.seen, seen) if found.seen else seen
            found.add(reach((("", value) for value in new), known, _MOST_MADE_SINCE))
        return found, held

    def namespace(self, path: str) -> Namespace | None:
        """The one that has a path; None if there is none."""
        return next((one for one in self._reach.namespaces if one.path == path), None)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of torch that were found, by path."""
        for namespace in self._reach.namespaces:
            if (module := namespace.module) is not None:
                yield namespace.path, module

    def optimizers(self) -> Iterator[Optimizer]:
        """The optimizers that were found, those of the state among them."""
        for namespace in self._reach.namespaces:
            if isinstance(namespace.owner, Optimizer):
                yield namespace.owner

    def part_saves(self, path: str, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the part of the state through which a path leads has copies of tensors in its own state."""
        part = self.state.small.get(root_of(path))
        saved = [*tensors_in(part.state_dict())] if part is not None else []
        return bool(saved) and all(
            any(one.shape == tensor.shape and same_bits(one, local(tensor).to(one.device)) for one in saved)
            for tensor in tensors
        )

    def _large_of(self, found: list[tuple[Namespace, str, Any]]) -> dict[str, torch.Tensor]:
        return {
            f"{namespace.path}.{name}": value
            for namespace, name, value in found
            if isinstance(value, torch.Tensor)
            and value.layout == torch.strided  # a sparse one has no size in bytes
            and value.nbytes > MOST_BYTES
            and namespace.module is not None
            and value.grad_fn is None
            and not self.is_protected(value)
        }

    def _copy(
        self, values: Iterable[Any], most_bytes: int, leaves: Leaves, *, once_changed: bool = False
    ) -> None:
        for value in values:
            if type(value) in FIXED_EXACTLY or (isinstance(value, torch.Tensor) and self._has_copy(value)):
                continue
            leaves.add(value, most_bytes, once_changed=once_changed)

    def _copy_large(self, values: Sequence[Any], leaves: Leaves) -> None:
        """Of what a step can reach, all that is too large for a copy in each step."""
        containers = [one for one in (*self._reach.seen.values(), *values) if isinstance(one, CONTAINERS)]
        inner = [one for container in containers if len(container) > MOST_ELEMENTS for one in _in(container)]
        self._copy(inner, FEW_BYTES, leaves)
        for value in (*values, *self._heavy.large, *inner):
            if isinstance(value, torch.Tensor | np.ndarray) and not self._has_copy(value):
                leaves.add_large(value, self._changing)

    def _has_copy(self, value: Any) -> bool:
        """Whether a value is protected, and no more is in its memory than the state saves."""
        if not self.is_protected(value):
            return False
        if not self._partly or not isinstance(value, torch.Tensor) or is_lazy(value):
            return True
        return storage_id(local(value)) not in self._partly

    def is_protected(self, value: Any) -> bool:
        """Whether a value belongs to the large state, which is put back and travels in other ways.

        Tensors do, and what optimizers keep their groups and their state in.
        """
        if not isinstance(value, torch.Tensor):
            return id(value) in self._of_optimizers
        # A parameter's memory may be another one since the last look.
        return id(value) in self._parameters or value.is_meta or is_lazy(value) or self.is_large_state(value)

    def is_large_state(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the memory of one of the state, or of a gradient."""
        here = local(tensor)
        return storage_id(here) in self._protected or self._has_gradient(*memory_of(here))

    def _has_gradient(self, address: int, count: int) -> bool:
        """Whether a parameter has one in these bytes now: what a script keeps may be one no more."""
        if self._gradients is None:
            found = map(local, self._gradients_now())
            self._gradients = sorted(one.data_ptr() for one in found if one.layout == torch.strided)
        place = bisect_left(self._gradients, address)
        return place < len(self._gradients) and self._gradients[place] < address + count

    def _gradients_now(self) -> Iterator[torch.Tensor]:
        for parameter in (*self.state.named_parameters().values(), *self.in_no_module):
            if parameter.grad is not None:
                yield parameter.grad

    def frame(self, function: str) -> FrameType | None:
        """The frame of a function that runs the loop; None if it has returned."""
        return loop_frames(self.epochs).get(function)

    def of_loop(self) -> dict[tuple[str, str], Any]:
        """The variables of the functions that run the loop, by function and name; of a module, none."""
        return variables_in(loop_frames(self.epochs))

    def look(self) -> None:
        """Look for all that the script can reach: some milliseconds."""
        self._counted = number_of_counted()
        frames = loop_frames(self.epochs)
        modules = _modules_of(frames)
        python = (sys.modules.get(variables.get("__name__", "")) for variables in modules.values())
        known = {id(module): module for module in python}
        self._reach = reach(self._roots(frames, modules), known, last=_own_files())
        self._reach.seen.update(known)
        self._say_if_crowded(self._reach.crowded)
        for path, variables in modules.items():
            self._reach.namespaces.append(Namespace(path, variables))
        self._modules_of_loop = len(modules)
        self._heavy.take_from(self._reach)
        self._looked_through = [*_few_enough([*self._reach.seen.values()])]
        self._steps_since_look = self._new = 0
        self._note_slots()
        unsaved = [namespace.variables[name] for namespace, name in self.slots if namespace.is_of_buffers]
        in_modules = {*map(id, self.state.named_parameters().values())}
        self.in_no_module = [one for _, one in self.state.parameters if id(one) not in in_modules]
        self._parameters = {*in_modules, *map(id, self.in_no_module)}
        self._gradients = None
        large, small = [*map(local, self._large())], [*map(local, self._of_parts())]
        self._protected = storage_names([*large, *small])
        self._partly = _covered_in_part(small) - {*map(storage_id, large)}
        for one in unsaved:
            if isinstance(one, torch.Tensor):
                self._protected.pop(storage_id(local(one)), None)
        self._of_optimizers = {*map(id, self._containers_of_optimizers())}

    def _say_if_crowded(self, name: str) -> None:
        if name and not self._said_crowded:
            self._said_crowded = True
            _logger.warning(
                "the script can reach too many objects, most of them in %s: what is in those beyond is "
                "neither put back nor handed over. Keep such data in arrays",
                name,
                extra={"event": "too_many_objects", "variable": name},
            )

    def _roots(
        self, frames: Mapping[str, FrameType], modules: Mapping[str, dict[str, Any]]
    ) -> Iterator[tuple[str, Any]]:
        """The state's parts first: what they reach has their names. Then from the outermost function on."""
        parts = {**self.state.modules, **self.state.optimizers, **self.state.small}
        yield from parts.items()

        def named(
            variables: Mapping[str, Any], prefix: str, taken: Container[str] = ()
        ) -> Iterator[tuple[str, Any]]:
            for name, value in variables.items():
                # Another object than the part of this name must not have its path.
                other = prefix + name in parts and parts[prefix + name] is not value
                kind = f"{_GLOBAL} " if name in taken else f"{_VARIABLE} " if other else ""
                yield f"{kind}{prefix}{name}", value

        names: set[str] = set()  # of functions: by their code, since not all may have a value yet
        for function, frame in frames.items():
            # An epoch's function is called anew each time: what it holds must not have the name of another.
            apart = function == PASSES_ON or (function == LOOP and EPOCHS in frames)
            prefix = f"{frame.f_code.co_name}()." if apart else ""
            yield from named(frame.f_locals, prefix)
            code = frame.f_code
            names |= set() if apart else {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        for path, variables in modules.items():
            own = {name: value for name, value in variables.items() if not name.startswith("__")}
            yield from named(own, f"{path}.", ()) if path else named(own, "", names)

    def _containers_of_optimizers(self) -> Iterator[Any]:
        for optimizer in self.state.optimizers.values():
            yield from (optimizer.param_groups, *optimizer.param_groups, optimizer.state)
            yield from (group["params"] for group in optimizer.param_groups)
            yield from optimizer.state.values()

    def _large(self) -> Iterator[torch.Tensor]:
        gradients = {*map(id, self._gradients_now())}
        yield from (tensor for tensor in self.state.tensors() if id(tensor) not in gradients)
        yield from (*self.state.named_parameters().values(), *self.in_no_module)

    def _of_parts(self) -> Iterator[torch.Tensor]:
        for part in self.state.small.values():
            yield from tensors_in(part.state_dict())

    def _note_slots(self) -> None:
        namespaces = self._reach.namespaces
        self.slots = [(n, name) for n in namespaces for name in n.names()]
        of_loop = {*map(id, namespaces[len(namespaces) - self._modules_of_loop :])}
        places = (index for index, (namespace, _) in enumerate(self.slots) if id(namespace) in of_loop)
        self._first_of_loop = next(places, len(self.slots))
        self._sizes = [len(namespace.variables) for namespace in namespaces]


def _modules_of(frames: Mapping[str, FrameType]) -> dict[str, dict[str, Any]]:
    """The variables of the modules that the loop's functions are in, by path: "" is the outermost's."""
    found: dict[str, dict[str, Any]] = {}
    for frame in frames.values():
        if not any(frame.f_globals is one for one in found.values()):
            name = str(frame.f_globals.get("__name__", "module"))
            found[path_of_file(name) if found else ""] = frame.f_globals
    return found


def _own_files() -> Iterator[tuple[str, ModuleType]]:
    """Files that functions of the script have imported for themselves by now: nothing else may lead there."""
    own = [one for name, one in [*sys.modules.items()] if isinstance(one, ModuleType) and is_own_module(name)]
    names = dict.fromkeys(name for module in own for name in sorted(imported_within(module)))
    for name in names:
        if isinstance(module := sys.modules.get(name), ModuleType) and is_own_module(name):
            yield name, module


def _few_enough(values: Iterable[Any]) -> Iterator[Any]:
    """The containers among some values that a step has the time to look through."""
    left = _MOST_LOOKED_THROUGH
    for one in values:
        if not isinstance(one, CONTAINERS) or isinstance(one, bytearray):
            continue
        length = len(one)
        if length > _FEW:
            left -= length if length <= MOST_ELEMENTS else 0
            if length > MOST_ELEMENTS or left < 0:
                continue
        yield one


def _covered_in_part(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages in which there is more than these dense tensors view, by :func:`storage_id`."""
    views: dict[int, set[tuple[int, int]]] = {}
    bytes_of: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor):
            number = storage_id(tensor)
            views.setdefault(number, set()).add((tensor.data_ptr(), tensor.nbytes))
            bytes_of[number] = memory_of(tensor)[1]
    return {number for number, held in views.items() if sum(size for _, size in held) < bytes_of[number]}


def _in(container: Any, depth: int = 0) -> Iterator[Any]:
    """Values that change in place in a container that is not looked into: those in objects are left out."""
    if isinstance(container, bytearray) or len(container) > MOST_NOTED:
        return
    for one in container if isinstance(container, tuple) else content_in(container):
        if isinstance(one, (tuple, *CONTAINERS)):
            if not isinstance(one, tuple):
                yield one
            if depth < _DEEPEST:
                yield from _in(one, depth + 1)
        elif isinstance(one, (torch.Tensor, np.ndarray, *GENERATORS)):
            yield one


def _leads_on(value: Any, seen: Container[int]) -> bool:
    """Whether there may be something in a value that changes, and that was not seen yet, by ``id()``."""
    if type(value) in FIXED_EXACTLY or id(value) in seen or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, MethodType):
        return _leads_on(value.__self__, seen) or _leads_on(value.__func__, seen)
    if isinstance(value, partial):
        return any(_leads_on(one, seen) for one in (value.func, *value.args, *value.keywords.values()))
    return isinstance(value, CONTAINERS) or is_namespace(value)


def root_of(path: str) -> str:
    """The name from which a path begins."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]
