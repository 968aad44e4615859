"""The kinds of values in a script: those noted by reference, those noted by copy, and those left out.

What is of no kind here (threads, files, iterators, objects of libraries) is left as it is.
"""

from __future__ import annotations

import argparse
import enum
import functools
import random
import re
import sys
import threading
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import (
    BuiltinMethodType,
    EllipsisType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.program.own_code import is_class_of_runtime, is_of_runtime, is_own_class, is_own_module

_FIXED: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, frozenset),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.generic, np.dtype),
    *(enum.Enum, PurePath, date, time, timedelta, tzinfo, Decimal, Fraction, UUID, re.Pattern, EllipsisType),
)
FIXED_EXACTLY = frozenset({bool, int, float, str, type(None)})
"""The most common types of values that never change in themselves: asked first."""
PROXIES = frozenset(weakref.ProxyTypes)
"""Of objects that may be gone by now: then any question is an error, also for its class."""
BY_REFERENCE = FIXED_EXACTLY | PROXIES | {FunctionType, type, ModuleType, classmethod, staticmethod, property}
"""The most common types of values that are noted without a look at what is in them."""
OF_BYTES = (bytearray, array)
"""Containers of bytes and of numbers in such."""
HOLDERS = (list, dict, set, deque)
"""Containers of other things."""
CONTAINERS = (*HOLDERS, *OF_BYTES)
"""Types whose values change in place, so that they are copied."""
GENERATORS = (
    *(torch.Generator, np.random.Generator, np.random.RandomState, random.Random),
    *(np.random.BitGenerator, np.random.SeedSequence),
)
"""Generators of random numbers that a script may have of its own, and what makes seeds of further ones."""
_SPAWNED = "swift_ft.spawned"
"""The key of what a generator of NumPy's has spawned, in its state."""
MOST_OF_GRAPH_BYTES = 2**20
"""Of a tensor that still has its graph as a step begins, as a recurrent state may. The copy has none."""
MOST_ELEMENTS = 1024
"""Of a container whose elements are looked into. Larger ones are data sets and histories, as a rule."""
CACHE = type(functools.cache(int))
"""Of functions that remember their results."""
_WITH_CONTAINER = frozenset(
    {UserDict, UserList, ChainMap, WeakKeyDictionary, WeakValueDictionary, threading.local}
)
"""Classes of Python's whose objects have a container as an attribute, or attributes of a thread: here of the
main one. Those that libraries derive from these are left out: batches are among them."""
_CONFIGURATIONS = frozenset({"PretrainedConfig", "PreTrainedConfig"})
"""Classes of transformers, from which those of its models' configurations derive."""
_VALUES = (torch.Tensor, *_FIXED, np.ndarray, *CONTAINERS, *GENERATORS)
_REFERENCES: tuple[type, ...] = (
    *(FunctionType, type, ModuleType, MethodDescriptorType, WrapperDescriptorType, np.ufunc, CACHE, ref),
)
_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)


def is_understood(value: Any) -> bool:
    """Whether a variable with this value may be given its earlier one instead."""
    if type(value) in PROXIES:
        return False
    if isinstance(value, tuple):
        return all(map(is_understood, value))
    return is_value(value) or is_reference(value)


def stays_where_it_is(value: Any) -> bool:
    """Whether something has a life of its own, which nothing takes back: an iterator, a thread, a file."""
    try:
        is_iterator = isinstance(value, Iterator)
    except Exception:  # a proxy that answers for something else, which is not there
        return True
    return is_iterator or type(value).__module__.partition(".")[0] in sys.stdlib_module_names


def is_of_session(value: Any) -> bool:
    """Whether it is what a session has given to the script: a step, itself, an iterator of its own.

    Each process has its own, as of proxies. A module or an optimizer of this package may be part of the
    training.
    """
    if type(value) in PROXIES:
        return True
    if isinstance(value, GeneratorType):
        return is_of_runtime(value.gi_code.co_filename)
    kind = type(value)
    if kind in FIXED_EXACTLY or not is_class_of_runtime(kind):
        return False
    return not isinstance(value, (nn.Module, Optimizer, *_VALUES))


def is_value(value: Any) -> bool:
    """Whether it is a value or something of the script's own: no mere reference to a library's function."""
    if type(value) in FIXED_EXACTLY:
        return True
    if isinstance(value, tuple):
        return all(map(is_value, value))
    return _is_of_value(type(value)) or is_namespace(value)  # type: ignore[arg-type]  # a class has a hash


@functools.cache
def _is_of_value(kind: type) -> bool:
    return issubclass(kind, _VALUES)


def is_reference(value: Any) -> bool:
    """Whether it is a function, a method, a class or a module: none changes in itself, or can be copied.

    A method is as its object is: that of an iterator stays where it is, as the iterator does.
    """
    if isinstance(value, _METHODS):
        return value.__self__ is None or is_understood(value.__self__)
    if isinstance(value, functools.partial):
        return all(map(is_understood, (value.func, *value.args, *value.keywords.values())))
    return isinstance(value, _REFERENCES)


def is_copied(tensor: torch.Tensor, most_bytes: int) -> bool:
    """Whether a tensor is noted by a copy: no large one, and no sparse one."""
    if tensor.grad_fn is not None:
        most_bytes = min(most_bytes, MOST_OF_GRAPH_BYTES)
    return tensor.layout == torch.strided and tensor.nbytes <= most_bytes


def is_fixed(value: Any) -> bool:
    """Whether a value never changes in itself."""
    if type(value) in FIXED_EXACTLY:
        return True
    return all(map(is_fixed, value)) if isinstance(value, tuple) else isinstance(value, _FIXED)


def changes_in_itself(value: Any) -> bool:
    """Whether a value may change in place, or one of a tuple. Objects with variables are left out."""
    if isinstance(value, tuple):
        return any(map(changes_in_itself, value))
    return isinstance(value, (*CONTAINERS, torch.Tensor, np.ndarray, *GENERATORS))


def is_namespace(value: Any) -> bool:
    """Whether it is something of the script's own with variables: an object, a class, a module, a function.

    Modules of torch and optimizers are, too, wherever their class comes from.
    """
    if isinstance(value, nn.Module | Optimizer):
        return True
    if isinstance(value, ModuleType):
        return is_own_module(value.__name__)
    if isinstance(value, FunctionType):
        return is_own_module(value.__module__ or "")
    if isinstance(value, type):
        return is_own_class(value) and not issubclass(value, enum.Enum)
    if isinstance(value, argparse.Namespace | SimpleNamespace) or is_librarys_namespace(type(value)):
        return True
    if isinstance(value, enum.Enum):  # a variable may name another member, and all members stay what they are
        return False
    return is_own_class(type(value)) and (has_dict(value) or has_slots(value))


def is_librarys_namespace(kind: type) -> bool:
    """Whether a class of a library's is known, whose objects hold what a script sets: a configuration."""
    return kind in _WITH_CONTAINER or _is_configuration(kind.__mro__)


@functools.cache
def _is_configuration(classes: tuple[type, ...]) -> bool:
    of_transformers = (one.__name__ for one in classes if one.__module__.startswith("transformers."))
    return not _CONFIGURATIONS.isdisjoint(of_transformers)


def is_object(value: Any) -> bool:
    """Whether it is an object with variables: of a class of the script's own, a module, an optimizer."""
    return not isinstance(value, type | FunctionType | ModuleType) and is_namespace(value)


def has_dict(value: Any) -> bool:
    """Whether an object has a ``__dict__``: its ``__getattr__``, which may raise any error, is not asked."""
    return bool(type(value).__dictoffset__)


def has_slots(value: Any) -> bool:
    """Whether an object keeps its variables, or some of them, in slots."""
    kind = type(value)
    return not issubclass(kind, tuple | type) and any(base.__dict__.get("__slots__") for base in kind.__mro__)


def read_state(generator: Any) -> Any:
    """The state of one of :data:`GENERATORS`, as a value of its own.

    None of one that has none, as ``random.SystemRandom``.
    """
    try:
        return _state_of(generator)
    except NotImplementedError:
        return None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    if isinstance(generator, np.random.BitGenerator):
        return _copied(generator.state) | _spawned(generator)
    if isinstance(generator, np.random.SeedSequence):
        return _copied(generator.state)
    if isinstance(generator, np.random.RandomState):
        return _copied(generator.get_state(legacy=False))
    return generator.getstate()


def same_state(one: Any, other: Any) -> bool:
    """Whether two results of :func:`read_state` are the same."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def write_state(generator: Any, state: Any) -> None:
    """The inverse of :func:`read_state`."""
    if state is None:
        return
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        _write_numpy(generator.bit_generator, state)
    elif isinstance(generator, np.random.BitGenerator):
        _write_numpy(generator, state)
    elif isinstance(generator, np.random.SeedSequence):
        _write_seed(generator, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _spawned(bits: np.random.BitGenerator) -> dict[str, Any]:
    """The number of generators spawned of one, by which the next one is chosen, and its seed."""
    seed = bits.seed_seq
    if not (isinstance(seed, np.random.SeedSequence) and seed.n_children_spawned):
        return {}
    return {_SPAWNED: _copied(seed.state)}


def _write_numpy(bits: np.random.BitGenerator, state: dict[str, Any]) -> None:
    bits.state = {key: value for key, value in state.items() if key != _SPAWNED}
    spawned, now = state.get(_SPAWNED, {}), _spawned(bits).get(_SPAWNED, {})
    if spawned != now:
        _write_seed(bits.seed_seq, {**now, "n_children_spawned": 0, **spawned})


def _write_seed(seed: Any, state: dict[str, Any]) -> None:
    """In place: what is counted cannot be set, and a generator may share it with the script's variables."""
    np.random.SeedSequence.__init__(seed, **state)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value
