"""The values that a script's step can reach, from the session's state and from the variables of its loop.

    roots ─▶ namespaces (modules, optimizers, the script's own objects, classes, functions, modules)
               └─▶ slots: a namespace and the name of a variable
               └─▶ containers and what is in them: further namespaces, and leaves (lists, tensors, generators)

Objects of libraries are not namespaces: what is in them is theirs.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from swift_ft.checkpoint.step.kinds import CONTAINERS, GENERATORS, MOST_ELEMENTS, is_namespace
from swift_ft.torch_adapters.wrappers import is_torchs_wrapper
from swift_ft.torch_core.optimizers import BOOKKEEPING

MISSING: Any = object()
"""The value of a variable that does not exist."""

_MOST_NAMESPACES = 20_000


class Namespace:
    """Something that has variables.

    Args:
        path: how the script would get there, such as ``model.head``.
        owner: the object, class, module or function; a dictionary of variables stands for itself.
        hidden: names that belong to torch or to this package.
    """

    def __init__(self, path: str, owner: Any, hidden: frozenset[str] = frozenset()) -> None:
        self.path = path
        self._owner = owner
        self._hidden = hidden
        self.variables: Mapping[str, Any] = owner if isinstance(owner, dict) else vars(owner)

    @property
    def of_module(self) -> bool:
        """Whether it has the attributes of a module of torch."""
        return isinstance(self._owner, nn.Module)

    def may_lose(self, name: str) -> bool:
        """Whether a variable that is new may be deleted. What a module or a class has is mostly its code.

        A class that inherits a variable gets one of its own as it counts, as in ``type(self).calls += 1``:
        so does each class that ``fully_shard`` makes.
        """
        if isinstance(self._owner, type):
            return any(name in vars(base) for base in self._owner.__mro__[1:])
        return not isinstance(self._owner, dict | ModuleType)

    def names(self) -> list[str]:
        """The names of its variables."""
        return [name for name in self.variables if name not in self._hidden and not name.startswith("__")]

    def write(self, name: str, value: Any) -> None:
        """Give a variable a value; :data:`MISSING` deletes it."""
        if isinstance(self._owner, type):
            if value is not MISSING:
                setattr(self._owner, name, value)
            elif name in self.variables:
                delattr(self._owner, name)
            return
        variables = self.variables
        assert isinstance(variables, dict)
        if value is MISSING:
            variables.pop(name, None)
        else:
            variables[name] = value


@dataclass
class Reach:
    """Everything that a script's step can reach.

    Attributes:
        namespaces: each once, by the first path that leads there.
        leaves: containers, tensors, arrays and generators that no variable holds itself: they are in
            containers.
        cells: what functions share with the function that they were made in, by path.
    """

    namespaces: list[Namespace]
    leaves: list[Any]
    cells: list[tuple[str, CellType]]


def reach(roots: Iterable[tuple[str, Any]]) -> Reach:
    """Look for all that there is.

    Args:
        roots: by name. What holds them is not a namespace here.
    """
    found = Reach([], [], [])
    seen: dict[int, Any] = {}
    todo: deque[tuple[str, Any, bool]] = deque((name, value, False) for name, value in roots)
    while todo and len(found.namespaces) < _MOST_NAMESPACES:
        path, value, in_container = todo.popleft()
        if id(value) in seen:
            continue
        if isinstance(value, CONTAINERS):
            seen[id(value)] = value
            if in_container:
                found.leaves.append(value)
            todo.extend((inner, element, True) for inner, element in _elements(path, value))
        elif isinstance(value, tuple):
            todo.extend((f"{path}[{i}]", element, True) for i, element in enumerate(value[:MOST_ELEMENTS]))
        elif isinstance(value, (torch.Tensor, np.ndarray, *GENERATORS)):
            if in_container:
                seen[id(value)] = value
                found.leaves.append(value)
        elif isinstance(value, functools.partial):
            todo.extend([(path, value.func, False), (path, value.args, False), (path, value.keywords, False)])
        elif isinstance(value, MethodType):
            todo.append((path, value.__self__, False))
        elif is_namespace(value):
            seen[id(value)] = value
            todo.extend(_look_into(path, value, found))
    return found


def _look_into(path: str, value: Any, found: Reach) -> Iterator[tuple[str, Any, bool]]:
    """Note a namespace. Returns what its variables hold."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, cell in cells:
            found.cells.append((f"{path}.{name}", cell))
            if (content := content_of(cell)) is not MISSING:
                yield f"{path}.{name}", content, False
        yield path, value.__defaults__, True
    if isinstance(value, nn.Module):
        # A wrapper of torch's own that communicates keeps there what a recovery makes anew.
        wraps = is_torchs_wrapper(value)
        if not wraps:
            found.namespaces.append(Namespace(path, value, _hidden_in_modules()))
        for name, child in value._modules.items():
            if child is not None:  # what is wrapped has the name that the script gave it
                yield path if wraps else f"{path}.{name}", child, False
    elif isinstance(value, Optimizer):
        found.namespaces.append(Namespace(path, value, _hidden_in_optimizers()))
    elif vars(value) or not isinstance(value, FunctionType):
        found.namespaces.append(Namespace(path, value))
    else:
        return
    if found.namespaces and found.namespaces[-1].path == path:
        namespace = found.namespaces[-1]
        yield from ((f"{path}.{name}", namespace.variables[name], False) for name in namespace.names())
    if isinstance(value, type):
        yield from ((base.__name__, base, False) for base in value.__bases__)
    elif not isinstance(value, ModuleType | FunctionType):
        yield type(value).__name__, type(value), False  # what objects of a class share


def content_of(cell: CellType) -> Any:
    """The value in a cell of a closure; :data:`MISSING` if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _elements(path: str, container: Any) -> Iterator[tuple[str, Any]]:
    if len(container) > MOST_ELEMENTS or isinstance(container, bytearray):
        return
    if isinstance(container, dict):
        yield from ((f"{path}[{key!r}]", value) for key, value in container.items())
    else:
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(container))


@functools.cache
def _hidden_in_modules() -> frozenset[str]:
    return frozenset(vars(nn.Module())) - {"training"}


@functools.cache
def _hidden_in_optimizers() -> frozenset[str]:
    return frozenset(vars(SGD([torch.zeros(1, requires_grad=True)], lr=0.1))) | BOOKKEEPING | {"_swift_undo"}
