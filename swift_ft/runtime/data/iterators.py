"""Iterators that a script takes its batches or its numbers from: they do not go back when a step does."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import itertools
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Sampler

from swift_ft.checkpoint.companions import is_companion
from swift_ft.checkpoint.step.namespaces import MISSING
from swift_ft.checkpoint.step.reach import content_of
from swift_ft.data.loader import LoaderBatches
from swift_ft.errors import UsageError
from swift_ft.program.loop_frame import loop_frame
from swift_ft.program.own_code import is_of_program, is_own_class, is_own_file, is_own_module
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import storage_id, tensors_in

_SESSION = str(Path(__file__).parents[2] / "session.py")
"""Whose generators are a session's steps."""
_NO_HOLDERS = (type, ModuleType, FunctionType, nn.Module, Optimizer, Dataset, Sampler)
"""A data set may read its samples from an iterator: there, its loader's place is what counts."""
_NO_BATCHES = (io.IOBase, enumerate, itertools.count, itertools.repeat)
"""Iterators over lines, numbers and the same thing."""
_MOST_LOOKED_INTO, _MOST_ELEMENTS = 10_000, 64
_DEPTH = 1
"""Of objects in objects that may hold one: a trainer's prefetcher."""
_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


def iterators_of_script() -> list[str]:
    """Names of the variables that hold one, in the function that runs the loop and in its module.

    Also in attributes of objects of the script's own that they hold, such as ``self.batches`` of a trainer.
    ``zip`` stands for the loop's own, as in ``for step, batch in zip(session.steps(n), loader)``.
    """
    if loop_frame() is None:
        return []
    found = [name for name, value in _variables() if _gives_batches(value)]
    found += [f"{name}.{attribute}" for name, holder in _holders() for attribute in _iterators_in(holder)]
    return [*found, "zip"] if _zips_steps() else found


def further_iterators() -> list[str]:
    """Names of further ones, which the functions that run the loop use in some other way.

    By what the code of these functions names: variables of other files of the program and of functions around
    them, attributes of classes, elements of containers, ``__next__`` of one, arguments of a ``partial``.
    """
    if (frame := loop_frame()) is None:
        return []
    variables, names = {**frame.f_globals, **frame.f_locals}, _names_in(frame.f_code)
    todo = deque((name, variables[name], names) for name in variables if name in names)
    found, seen = list[str](), set[int]()
    while todo and len(seen) < _MOST_LOOKED_INTO:
        path, value, names = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _gives_batches(value):
            found.append(path)
        else:
            todo += _used(path, value, names)
    near = {*iterators_of_script()}
    return [path for path in found if path not in near]


def _shown(key: Any) -> str:
    try:
        return repr(key)
    except Exception:  # one of the script's own: this is only for a warning
        return "..."


def _used(path: str, value: Any, names: frozenset[str]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Parts of a value that code with these names may use: a path, a value, and the names in code there."""
    kind = type(value)  # not isinstance(), which would ask proxies
    if issubclass(kind, functools.partial):
        yield from ((path, one, names) for one in (value.func, *value.args, *value.keywords.values()))
    elif issubclass(kind, BuiltinMethodType | MethodWrapperType | MethodType):
        yield path, value.__self__, names | {getattr(value, "__name__", "")}  # none of a partial's
    elif issubclass(kind, staticmethod | classmethod):
        yield path, value.__func__, names
    elif issubclass(kind, FunctionType):
        if is_of_program(value.__code__.co_filename):
            yield from _used_by_function(path, value)
    elif issubclass(kind, dict | list | tuple):
        pairs = value.items() if issubclass(kind, dict) else enumerate(value)
        if len(value) <= _MOST_ELEMENTS:
            yield from ((f"{path}[{_shown(key)}]", one, names) for key, one in pairs)
    elif issubclass(kind, ModuleType):
        if is_own_module(value.__name__):
            yield from ((f"{path}.{name}", vars(value)[name], names) for name in vars(value) if name in names)
    elif issubclass(kind, type) or not issubclass(kind, _NO_HOLDERS):
        shared = value if issubclass(kind, type) else kind
        if is_own_class(shared):
            own = (base for base in reversed(shared.__mro__) if is_own_class(base))
            held = {name: one for base in own for name, one in vars(base).items()}
            held |= {} if shared is value else _attributes(value)
            called = names | {"__call__", "__iter__", "__next__"}
            yield from ((f"{path}.{name}", one, names) for name, one in held.items() if name in called)


def _used_by_function(path: str, function: FunctionType) -> Iterator[tuple[str, Any, frozenset[str]]]:
    names, file = _names_in(function.__code__), function.__globals__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if (content := content_of(cell)) is not MISSING:
            yield f"{path}.{name}", content, names
    yield from ((path, one, names) for one in function.__defaults__ or ())
    yield from ((f"{path}.{name}", one, names) for name, one in (function.__kwdefaults__ or {}).items())
    home = "" if function.__module__ == "__main__" else f"{function.__module__}."
    yield from ((f"{home}{name}", file[name], names) for name in names if name in file)


def _names_in(code: CodeType) -> frozenset[str]:
    """All names in a function's code, and in that of functions in it."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset((*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)).union(
        *map(_names_in, inner)
    )


def kept_ahead() -> dict[int, tuple[str, torch.Tensor]]:
    """Tensors that an object of the script's own keeps beside an iterator, by their memory, and their names.

    So does one that fetches the next batch while a step computes.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, holder in _holders():
        if not _iterators_in(holder):
            continue
        for attribute, value in _attributes(holder).items():
            for tensor in tensors_in(value):
                if tensor.grad_fn is None and not isinstance(tensor, nn.Parameter):
                    found[storage_id(local(tensor))] = f"{name}.{attribute}", tensor
    return found


def _variables() -> Iterator[tuple[str, Any]]:
    """Of the function that runs the loop and of its module."""
    if (frame := loop_frame()) is not None:
        yield from {**frame.f_globals, **frame.f_locals}.items()


def _holders() -> Iterator[tuple[str, Any]]:
    """Objects of the script's own in these variables, and in attributes of such objects."""
    todo, seen = [(name, value, _DEPTH) for name, value in _variables()], set[int]()
    while todo:
        name, value, depth = todo.pop(0)
        if id(value) in seen or isinstance(value, _NO_HOLDERS) or not is_own_class(type(value)):
            continue
        seen.add(id(value))
        yield name, value
        if depth:
            todo += [(f"{name}.{inner}", one, depth - 1) for inner, one in _attributes(value).items()]


def _attributes(holder: Any) -> dict[str, Any]:
    return getattr(holder, "__dict__", {})


def _iterators_in(holder: Any) -> list[str]:
    return [name for name, value in _attributes(holder).items() if _gives_batches(value)]


def loader_goes_on() -> bool:
    """Whether there is an iterator of a DataLoader that is not one of :class:`LoaderBatches`.

    It may be one that gives no batches of the training, as in a validation, and no variable need hold it.
    """
    things = gc.get_objects()
    # Not isinstance(), which would ask proxies.
    own = {id(vars(thing).get("_iterator")) for thing in things if issubclass(type(thing), LoaderBatches)}
    return any(
        type(thing).__module__ in _LOADERS and hasattr(type(thing), "__next__") and id(thing) not in own
        for thing in things
    )


def may_keep_position(name: str, part: Any) -> bool:
    """Whether a small part of the session's state may say which batch comes next."""
    kind = type(part)
    return not (name.startswith("swift_ft.") or is_companion(kind) or "Scheduler" in kind.__name__)


def _gives_batches(value: Any) -> bool:
    if isinstance(value, GeneratorType):  # neither the steps themselves, nor a script's own that pass them on
        begun = inspect.getgeneratorstate(value) != inspect.GEN_CREATED  # else it has given nothing
        own = begun and is_own_file(value.gi_code.co_filename)
        return own and not any(map(_are_steps, gc.get_referents(value)))
    try:
        return isinstance(value, Iterator) and not isinstance(value, _NO_BATCHES)
    except Exception:  # a proxy that answers for something else, which is not there
        return False


def _zips_steps() -> bool:
    """Whether a loop goes through a session's steps and something else side by side."""
    for one in gc.get_objects():
        if type(one) is zip:
            members = [*_members(one)]
            if len(members) > 1 and any(map(_are_steps, members)):
                return True
    return False


def refuse_counted_steps() -> None:
    """Look for a loop over ``enumerate(session.steps(...))``, or over counted epochs.

    Raises:
        UsageError: there is one.
    """
    if any(type(one) is enumerate and _passes_on_steps(one) for one in gc.get_objects()):
        raise UsageError(
            "enumerate() counts a step again when it is repeated, and begins at 0 in a replacement: write "
            "`for step in session.steps(iterations):`, and take the number from step.index (in epochs, the "
            "epoch's from session.epochs()).",
            alike=True,
        )


def _passes_on_steps(thing: Any) -> bool:
    held = (one for one in gc.get_referents(thing) if isinstance(one, GeneratorType | enumerate))
    return any(_are_steps(one) or _passes_on_steps(one) for one in held)


def _members(zipped: zip[Any]) -> Iterator[Any]:
    for held in gc.get_referents(zipped):
        if isinstance(held, tuple):
            yield from held


def _are_steps(member: Any) -> bool:
    while isinstance(member, enumerate):
        member = next((held for held in gc.get_referents(member) if not isinstance(held, int)), None)
    return isinstance(member, GeneratorType) and member.gi_code.co_filename == _SESSION
