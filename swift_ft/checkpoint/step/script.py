"""All that a script keeps in variables, at the beginning of a step: attributes, counters, generators, flags.

A step is a transaction: what the script changes in it, or around it, is put back before it is repeated.
That is not a list of names. All is noted that a step can reach (:mod:`swift_ft.checkpoint.step.reach`): small
values by copy, all others by reference.
"""

from __future__ import annotations

import logging
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.step.caches import Remembered
from swift_ft.checkpoint.step.changing_values import ChangingValues
from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.counted import number_of_counted
from swift_ft.checkpoint.step.kept_paths import KeptPaths
from swift_ft.checkpoint.step.kinds import (
    BY_REFERENCE,
    CONTAINERS,
    FIXED_EXACTLY,
    HOLDERS,
    MOST_ELEMENTS,
    PROXIES,
    is_namespace,
)
from swift_ft.checkpoint.step.leaves import MOST_BYTES
from swift_ft.checkpoint.step.namespaces import MISSING, Namespace
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
from swift_ft.checkpoint.step.protected import ProtectedValues
from swift_ft.checkpoint.step.reach import Reach, content_of, leads_nowhere, path_of_file, reach
from swift_ft.checkpoint.step.references import References
from swift_ft.checkpoint.step.results import HeavyContainers, holds_results
from swift_ft.checkpoint.step.unordered import NAMELESS
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.program.inner_imports import imported_within
from swift_ft.program.loop_frame import EPOCHS, LOOP, PASSES_ON, loop_frames
from swift_ft.program.own_code import is_own_module

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
        protected: tells what belongs to the state from all else.
        changing: the large values that are known to change.
        unnoted: containers that were too large at the last note, by ``id()``.
    """

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.epochs: CodeType | None = None
        self.protected = ProtectedValues(state)
        self.changing = ChangingValues(self.protected)
        self.unnoted: set[int] = set()
        self._reach = Reach([], [], [], {})
        self._kept = KeptPaths()  # of what the script has made outside of steps
        self._before_epoch: Mapping[str, int] = {}  # where earlier ones' paths led before its top
        self._left_out = False  # by the last look: what functions that steps have made are called with
        self.slots: list[tuple[Namespace, str]] = []
        self._sizes: list[int] = []
        self._counted = 0  # variables in which loaders count, at the last look
        self._looked_through: list[Any] = []  # containers whose new elements are found in each step
        self._heavy = HeavyContainers()  # others, with large tensors
        self._modules_of_loop = 0  # that run the loop: the last namespaces
        self._first_of_loop = 0  # the first slot of these
        self._steps_since_look = self._new = 0
        self._said_crowded = False

    @property
    def cells(self) -> list[tuple[str, CellType]]:
        """The cells that functions share with the function that they were made in, by path."""
        return self._reach.cells

    @property
    def nameless_leaves(self) -> list[tuple[str, Any]]:
        """Values that no variable holds itself, and that have no place of their own, by path."""
        return self._reach.nameless

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
        self.protected.note(parameters)
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
        leaves = self.changing.new_leaves(whole=whole, large=large)
        in_place = [*(raw[index] for index in others), *(value for _, value in cells), *self._reach.leaves]
        in_place += [one for one in self._heavy.containers if id(one) not in results]
        leaves.add_all([*in_place, *inner], MOST_BYTES)
        leaves.add_all([*loop.values(), *late.leaves], OF_LOOP_BYTES)
        large_of_loop = [value for value in loop.values() if is_large_of_loop(value)]
        leaves.add_all(large_of_loop, MOST_BYTES, once_changed=True)
        of_modules = self._large_of([(*slots[index], raw[index]) for index in others])
        if large:
            apart = {*map(id, of_modules.values())}
            held = (*in_place, *inner, *loop.values(), *late.leaves)
            values_held = [*(one for one in held if id(one) not in apart), *self._heavy.large]
            self.changing.copy_large(values_held, self._reach.seen.values(), leaves)
        else:
            self.unnoted = leaves.unnoted
        self.changing.noted(leaves)
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

    def path_of(self, value: Any) -> str | None:
        """The path of an object of the script's own, by which another process finds it; None without one."""
        path = self._kept.path_of(value)
        return None if path is None or NAMELESS in path else path

    def object_at(self, path: str) -> Any:
        """The object that has a path, as :meth:`path_of` has said; None if this process has none there."""
        return self._kept.object_at(path)

    def keep_paths(self, of: Callable[[str], bool] = lambda _: True) -> None:
        """All that the last look has found keeps its path, so that a replacement finds it by the same one.

        Args:
            of: tells by its path whether something does.
        """
        self._keep({number: path for number, path in self._reach.names.items() if of(path)}, of_epoch=False)

    def keep_paths_of_epoch(self) -> None:
        """As :meth:`keep_paths`, of what the lines at the top of an epoch have made.

        Things of earlier epochs keep theirs, but for those that have been replaced.
        """
        before, self._before_epoch = self._before_epoch, {}
        while self._kept.make_way_for_epoch(before, self._reach):
            self.look()
        self._keep(self._reach.names, of_epoch=True)

    def _keep(self, names: Mapping[int, str], *, of_epoch: bool) -> None:
        self._kept.keep(names, self._reach.seen, of_epoch=of_epoch)
        if self._left_out:
            self.look()

    def epoch_begins(self, code: CodeType | None) -> None:
        """The script has asked for the next epoch, in a function with this code."""
        self.epochs = code or self.epochs
        if self._kept:
            self.look()
            self._before_epoch = self._reach.leads_to

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

    def _large_of(self, found: list[tuple[Namespace, str, Any]]) -> dict[str, torch.Tensor]:
        return {
            f"{namespace.path}.{name}": value
            for namespace, name, value in found
            if isinstance(value, torch.Tensor)
            and value.layout == torch.strided  # a sparse one has no size in bytes
            and value.nbytes > MOST_BYTES
            and namespace.module is not None
            and value.grad_fn is None
            and not self.protected.has(value)
        }

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
        roots, last = [*self._roots(frames, modules)], [*_own_files()]
        heavy = {*map(id, self._heavy.containers)}
        references = References(self.state.named_parameters(), self.state.modules)

        def found() -> Reach:
            asked, kept = self._kept.of_epochs, self._kept.before_look(heavy)
            return reach(roots, known, last=last, kept=kept, asked=asked, references=references)

        self._reach = found()
        if self._kept.make_way(self._reach):
            self._reach = found()
        self._reach.seen.update(known)
        # A replacement does not have what steps have made.
        self._left_out = bool(self._kept) and self._reach.leave_out_arguments_of(self._reach.names.values())
        self._say_if_crowded(self._reach.crowded)
        for path, variables in modules.items():
            self._reach.namespaces.append(Namespace(path, variables))
        self._modules_of_loop = len(modules)
        self._heavy.take_from(self._reach)
        self._kept.after_look(self._reach.seen)
        self._looked_through = [*_few_enough([*self._reach.seen.values()])]
        self._steps_since_look = self._new = 0
        self._note_slots()
        unsaved = [namespace.variables[name] for namespace, name in self.slots if namespace.is_of_buffers]
        self.protected.look(unsaved)

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
        if not isinstance(one, HOLDERS):
            continue
        length = len(one)
        if length > _FEW:
            left -= length if length <= MOST_ELEMENTS else 0
            if length > MOST_ELEMENTS or left < 0:
                continue
        yield one


def _leads_on(value: Any, seen: Container[int]) -> bool:
    """Whether there may be something in a value that changes, and that was not seen yet, by ``id()``."""
    kind = type(value)
    if kind in FIXED_EXACTLY or kind in PROXIES or id(value) in seen or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, MethodType):
        return _leads_on(value.__self__, seen) or _leads_on(value.__func__, seen)
    if isinstance(value, partial):
        return any(_leads_on(one, seen) for one in (value.func, *value.args, *value.keywords.values()))
    return isinstance(value, CONTAINERS) or is_namespace(value)
