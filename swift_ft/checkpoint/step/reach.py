"""The values that a script's step can reach, from the session's state and from the variables of its loop.

    roots ─▶ namespaces (modules, optimizers, the script's own objects, classes, functions, modules)
               └─▶ slots: a namespace and the name of a variable
               └─▶ containers and what is in them: further namespaces, and leaves (lists, tensors, generators)

Objects of libraries are not namespaces: what is in them is theirs.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import (
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from swift_ft.checkpoint.step.caches import results_in
from swift_ft.checkpoint.step.held_by_libraries import passed_on
from swift_ft.checkpoint.step.kinds import (
    CACHE,
    CONTAINERS,
    GENERATORS,
    MOST_ELEMENTS,
    PROXIES,
    has_dict,
    is_librarys_namespace,
    is_namespace,
)
from swift_ft.checkpoint.step.namespaces import (
    CODE,
    MISSING,
    OF_BUFFERS,
    Given,
    Namespace,
    arguments_of,
    defaults_of,
    is_mixed,
)
from swift_ft.checkpoint.step.references import References
from swift_ft.checkpoint.step.unordered import NAMELESS, UNORDERED, NamesOfKeys, Todo
from swift_ft.program.own_code import is_own_class, is_own_module
from swift_ft.torch_adapters.wrappers import is_torchs_wrapper
from swift_ft.torch_core.buffers import with_unsaved
from swift_ft.torch_core.module_hooks import hooks_of
from swift_ft.torch_core.optimizers import bookkeeping_of

OF_ATTRIBUTES = "(attributes)"
"""In the path of a namespace of a container that has attributes as well."""
OF_DEFAULTS, OF_ARGUMENTS, OF_KEYWORDS = "(defaults)", "(arguments)", "keywords"
"""In the paths of namespaces of a function's defaults, and of what a ``functools.partial`` calls it with."""
_FILE, _CLASS = "(module)", "(class)"
"""Before the names of modules of Python's and of classes. No variable has such a path: a model, the file that
it is made in and its class may have one name."""

_MOST_NAMESPACES = 20_000
"""Besides modules, of which a model may have more, and functions."""
_LEADING: tuple[type, ...] = (
    *(*CONTAINERS, tuple, torch.Tensor, np.ndarray, *GENERATORS, functools.partial, MethodType, CACHE),
    *(nn.Module, Optimizer, ModuleType, FunctionType, type, argparse.Namespace, SimpleNamespace),
    *UNORDERED,
)


@dataclass
class Reach:
    """Everything that a script's step can reach.

    Attributes:
        namespaces: each once, by the first path that leads there; no two have the same one.
        leaves: containers, tensors, arrays and generators that no variable holds itself: they are in
            containers.
        cells: what functions share with the function that they were made in, by path.
        caches: functions that remember their results.
        names: paths of objects, functions and partials, by ``id()``; what is in them has paths that begin so.
        leads_to: the things to which the paths have led that were asked for, by ``id()``.
        held_up: what has kept a path that led to another thing, by ``id()``.
        seen: all that was looked into, by ``id()``: it stays alive, so that no other thing gets that number.
        nameless: those leaves that have no place of their own, by path.
        crowded: what holds the most objects, if there are so many that not all were found.
    """

    namespaces: list[Namespace]
    leaves: list[Any]
    cells: list[tuple[str, CellType]]
    seen: dict[int, Any]
    caches: list[Any] = field(default_factory=list)
    nameless: list[tuple[str, Any]] = field(default_factory=list)
    crowded: str = ""
    names: dict[int, str] = field(default_factory=dict)
    leads_to: dict[str, int] = field(default_factory=dict)
    held_up: set[int] = field(default_factory=set)

    def note_leaf(self, path: str, value: Any) -> None:
        """Note one that a container holds."""
        self.leaves.append(value)
        if NAMELESS in path:
            self.nameless.append((path, value))

    def add(self, other: Reach) -> None:
        """Add another one's findings."""
        self.namespaces += other.namespaces
        self.leaves += other.leaves
        self.cells += other.cells
        self.caches += other.caches
        self.seen |= other.seen

    def leave_out_arguments_of(self, paths: Iterable[str]) -> bool:
        """Of these functions, they do not travel. Returns whether there are any."""
        of = (OF_DEFAULTS, OF_ARGUMENTS, OF_KEYWORDS)
        given = {f"{path}.{name}" for path in paths for name in of}
        found = len(self.namespaces)
        self.namespaces = [one for one in self.namespaces if one.path not in given]
        return len(self.namespaces) < found


def reach(
    roots: Iterable[tuple[str, Any]],
    known: Mapping[int, Any] | None = None,
    most_elements: int = sys.maxsize,
    *,
    last: Iterable[tuple[str, Any]] = (),
    kept: Mapping[int, tuple[str, Any]] | None = None,
    asked: Container[str] = (),
    references: References | None = None,
) -> Reach:
    """Look for all that there is.

    Args:
        roots: by name. What holds them is not a namespace here.
        known: things that are not looked into, by ``id()``.
        most_elements: of containers, together: what comes after them is not found.
        last: further roots: what the others lead to has their paths.
        kept: things that keep the paths of an earlier look, by ``id()``, whatever leads there first by now: a
            step may have given them to another variable.
        asked: paths of which to tell where they lead.
        references: by which the state's parameters and modules have names, as keys of dictionaries.
    """
    found, known = Reach([], [], [], {}), known or {}
    names = _Names(kept or {}, found)
    seen = found.seen
    todo = Todo((roots, last), NamesOfKeys(found.names, seen, references or References()))
    uncounted = 0
    while todo and len(found.namespaces) - uncounted < _MOST_NAMESPACES:
        path, value, in_container = todo.pop()
        if path in asked:
            found.leads_to.setdefault(path, id(value))
        if id(value) in seen or id(value) in known or type(value) in PROXIES:
            continue
        if isinstance(value, CONTAINERS):
            seen[id(value)] = value
            most_elements -= len(value)
            if most_elements < 0:
                break
            if is_mixed(value):
                path = names.of(value, path)
                found.namespaces.append(Namespace(path, value))
            elif in_container:
                found.note_leaf(path, value)
            todo.add_elements(path, value)
            if is_namespace(value) and not (has_dict(value) and value.__dict__ is value):
                todo.add(_look_into(names.of(value, path), value, found))
        elif isinstance(value, tuple):
            if in_container:
                seen[id(value)] = value
            todo.add((f"{path}[{i}]", element, True) for i, element in enumerate(value[:MOST_ELEMENTS]))
        elif isinstance(value, (torch.Tensor, np.ndarray, *GENERATORS)):
            if in_container:
                seen[id(value)] = value
                found.note_leaf(path, value)
        elif isinstance(value, functools.partial):
            seen[id(value)] = value
            path = names.of(value, path)
            _note_given(f"{path}.{OF_ARGUMENTS}", arguments_of(value), found)
            if value.keywords and not is_mixed(value.keywords):
                found.namespaces.append(Namespace(f"{path}.{OF_KEYWORDS}", value.keywords))
            todo.add([(path, value.func, False)])
            todo.add([(f"{path}.args", value.args, False), (f"{path}.{OF_KEYWORDS}", value.keywords, True)])
        elif isinstance(value, MethodType):
            todo.add([(path, value.__self__, False), (f"{path}.__func__", value.__func__, False)])
        elif isinstance(value, CACHE):
            if is_namespace(value.__wrapped__):
                seen[id(value)] = value
                todo.add([(path, value.__wrapped__, False)])
                found.caches.append(value)
                results = {str(number): result for number, result in enumerate(results_in(value))}
                found.namespaces.append(Namespace(f"{path}()", results, fixed=True))
                todo.add((f"{path}().{number}", result, False) for number, result in results.items())
        elif is_namespace(value):
            seen[id(value)] = value
            uncounted += isinstance(value, nn.Module | FunctionType)
            path = names.of(value, _path_of(value) or path)
            if isinstance(value, nn.Module):
                todo.add_first(_parts_of(path, value))
            todo.add(_look_into(path, value, found))
        elif isinstance(value, UNORDERED):
            todo.add_elements(path, value)
        else:
            todo.add((f"{path}.{name}", one, isinstance(one, list)) for name, one in passed_on(value))
    if todo and most_elements >= 0:
        found.crowded = _most_crowded(found.namespaces)
    _tell_apart(found)
    return found


class _Names:
    """Gives each object one path, which no other one of its kind has.

    Args:
        kept: those of an earlier look.
        found: gets those of this one.
    """

    def __init__(self, kept: Mapping[int, tuple[str, Any]], found: Reach) -> None:
        self._kept = kept
        self._given, self._held_up = found.names, found.held_up
        self._tries: dict[tuple[bool, str], int] = {}  # the last number that a path was given
        self._taken = {
            (isinstance(value, functools.partial), path): number for number, (path, value) in kept.items()
        }

    def of(self, value: Any, path: str) -> str:
        """The path of an object that is looked into, to which this one has led."""
        if is_torchs_wrapper(value):
            return path  # what it wraps has the same one
        if (number := id(value)) in self._kept:
            return self._kept[number][0]
        if number in self._given:
            return self._given[number]
        # Of a partial, its function has the same one.
        kind, found = isinstance(value, functools.partial), path
        tries = self._tries.get((kind, path), 1)  # all of a set have one path
        if tries > 1:
            found = f"{path} ({tries})"
        while (holder := self._taken.get((kind, found))) is not None:
            if holder in self._kept:
                self._held_up.add(holder)
            tries += 1
            found = f"{path} ({tries})"
        self._tries[kind, path] = tries
        self._taken[kind, found] = number
        self._given[number] = found
        return found


def _note_given(path: str, given: Given, found: Reach) -> None:
    """Note what an argument holds: it goes back as a leaf, and travels by this place."""
    if given:
        found.namespaces.append(Namespace(path, given, fixed=True))


def path_of_file(name: str) -> str:
    """The path of the variables of a module of Python's."""
    return f"{_FILE} {name}"


def _path_of(value: Any) -> str:
    """The path of a file and of a class, whatever led there; empty for all else.

    A class that ``fully_shard`` has made is of the file of the one that it was made of.
    """
    if isinstance(value, ModuleType):
        return path_of_file(value.__name__)
    if isinstance(value, type):
        homes = (base.__module__ for base in value.__mro__ if is_own_module(base.__module__))
        return f"{_CLASS} {next(homes, value.__module__)}.{value.__qualname__}"
    return ""


def _tell_apart(found: Reach) -> None:
    """Number those that have the path of another one, such as two classes that a function has made."""
    numbers: Counter[str] = Counter()
    for namespace in found.namespaces:
        numbers[namespace.path] += 1
        if (number := numbers[namespace.path]) > 1:
            namespace.path += f" ({number})"
    numbers.clear()
    for place, (path, cell) in enumerate(found.cells):
        numbers[path] += 1
        if (number := numbers[path]) > 1:
            found.cells[place] = f"{path} ({number})", cell


def _most_crowded(namespaces: Iterable[Namespace]) -> str:
    """The path of what holds most of them."""
    uncounted = (nn.Module, FunctionType)
    held = (namespace for namespace in namespaces if not isinstance(namespace.owner, uncounted))
    holders = Counter(re.sub(r"(\[[^]]*\]|\.[^.]*)$", "", namespace.path) for namespace in held)
    return max(holders, key=holders.__getitem__, default="")


def leads_nowhere(kind: type) -> bool:
    """Whether no object of a class is looked into: of a library's, and of what never changes in itself."""
    if kind in _LEADING or issubclass(kind, _LEADING):
        return False
    return not is_librarys_namespace(kind) and not is_own_class(kind)


def _look_into(path: str, value: Any, found: Reach) -> Iterator[tuple[str, Any, bool]]:
    """Note a namespace. Returns what its variables hold."""
    namespace: Namespace | None = None
    if isinstance(value, FunctionType):
        yield from _held_by_function(path, value, found)
        namespace = Namespace(path, value)  # a step may give it a variable
    elif isinstance(value, nn.Module):
        namespace = _look_into_module(path, value, found)
    else:
        hidden = frozenset[str]()
        if isinstance(value, Optimizer):
            hidden = _hidden_in_optimizers() | bookkeeping_of(value)
        at = f"{path}.{OF_ATTRIBUTES}" if is_mixed(value) else path  # of its entries there is another one
        namespace = Namespace(at, value, hidden, attributes=True)
    if isinstance(value, nn.Module | Optimizer):
        yield from ((f"{path}.{name}", hook, False) for name, hook in hooks_of(value))
    if namespace is not None:
        found.namespaces.append(namespace)
        yield from ((f"{path}.{name}", namespace.variables[name], False) for name in namespace.names())
    if isinstance(value, ModuleType):
        # Its code may lead to further files, whose variables the step may change.
        code = [(name, one) for name, one in vars(value).items() if isinstance(one, CODE)]
        yield from ((f"{path}.{name}", one, False) for name, one in code if not name.startswith("__"))
    elif isinstance(value, type):
        yield from ((f"{path}.{name}", one, False) for name, one in _hidden_code_of(value))
        yield value.__module__, sys.modules.get(value.__module__), False
        yield from ((base.__name__, base, False) for base in value.__bases__)
    elif not isinstance(value, FunctionType):
        yield type(value).__name__, type(value), False  # what objects of a class share


def _hidden_code_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Functions of a class that its namespace does not lead to: ``__call__``, static methods, properties."""
    for name, one in vars(kind).items():
        if isinstance(one, FunctionType):
            behind: tuple[Any, ...] = (one,) if name.startswith("__") else ()
        elif isinstance(one, staticmethod | classmethod):
            behind = (one.__func__,)
        elif isinstance(one, functools.cached_property | functools.partialmethod):
            behind = (one.func,)
        else:
            behind = (one.fget, one.fset, one.fdel) if isinstance(one, property) else ()
        yield from ((name, function) for function in behind if isinstance(function, FunctionType))


def _held_by_function(path: str, value: FunctionType, found: Reach) -> Iterator[tuple[str, Any, bool]]:
    """All that a function shares with others: what is in its cells, its defaults, its file's variables."""
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if name != "__class__":  # of each method that calls super(): it always has the same class
            found.cells.append((f"{path}.{name}", cell))
        if (content := content_of(cell)) is not MISSING:
            yield f"{path}.{name}", content, False
    _note_given(f"{path}.{OF_DEFAULTS}", defaults_of(value), found)
    yield path, value.__defaults__, True
    yield from ((f"{path}.{name}", one, True) for name, one in (value.__kwdefaults__ or {}).items())
    # The variables of the module that it was written in, which it may change.
    home = sys.modules.get(value.__module__)
    if home is not None and vars(home) is value.__globals__:
        yield value.__module__, home, False


def _parts_of(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules in one. What is wrapped has the name that the script gave it."""
    wraps = is_torchs_wrapper(module)
    for name, child in module._modules.items():
        if child is not None:
            yield path if wraps else f"{path}.{name}", child, False


def _look_into_module(path: str, module: nn.Module, found: Reach) -> Namespace:
    """Note what parameters have for attributes. Returns the module's own namespace."""
    for name, parameter in module._parameters.items():
        if parameter is not None and any(not one.startswith("_") for one in vars(parameter)):
            found.namespaces.append(Namespace(f"{path}.{name}", parameter, private="_"))
    buffers, saved = with_unsaved(module)
    if buffers.keys() - saved:  # no state_dict() has them, so that they travel as variables do
        found.namespaces.append(Namespace(f"{path}.{OF_BUFFERS}", buffers, saved))
    if not is_torchs_wrapper(module):
        return Namespace(path, module, _hidden_in_modules())
    # It keeps there what a recovery makes anew, too.
    return Namespace(f"{path}.(wrapper)", module, _hidden_in_wrappers(type(module).__mro__), private="_")


def content_of(cell: CellType) -> Any:
    """The value in a cell of a closure; :data:`MISSING` if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


@functools.cache
def _hidden_in_wrappers(classes: tuple[type, ...]) -> frozenset[str]:
    """All names that the code of torch's classes has: a script's own are others."""
    functions = (
        getattr(getattr(one, "__func__", one), "fget", getattr(one, "__func__", one))
        for base in classes
        for one in vars(base).values()
    )
    code = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    names: set[str] = set()
    while code:
        names.update((one := code.pop()).co_names)
        code += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return _hidden_in_modules() | names


@functools.cache
def _hidden_in_modules() -> frozenset[str]:
    return frozenset(vars(nn.Module())) - {"training"}


@functools.cache
def _hidden_in_optimizers() -> frozenset[str]:
    return frozenset(vars(SGD([torch.zeros(1, requires_grad=True)], lr=0.1))) | {"_swift_undo"}
