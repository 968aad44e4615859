"""Namespaces: all that has variables of the script's, from objects to the defaults of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn

from swift_ft.checkpoint.plain_classes import attributes
from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.counted import counted_in
from swift_ft.checkpoint.step.kinds import MOST_ELEMENTS, changes_in_itself, has_slots, is_value
from swift_ft.program.own_code import is_own_module
from swift_ft.torch_adapters.wrappers import is_torchs_wrapper

OF_BUFFERS = "(buffers)"
"""In the path of a namespace of buffers that no ``state_dict()`` has."""
CODE = (FunctionType, BuiltinFunctionType, type, ModuleType)
"""Of which the variables of a module of Python's are, mostly."""
MISSING: Any = object()
"""The value of a variable that does not exist."""


class Namespace:
    """Something that has variables.

    Args:
        hidden: names that belong to torch or to this package.
        private: how such names begin.
        attributes: of a dictionary, its attributes are meant, and not its entries.
        fixed: nothing can be added to it.

    Attributes:
        path: how the script would get there, such as ``model.head``.
        owner: the object, class, module or function; a dictionary of variables stands for itself.
        variables: their values now, by name.
    """

    def __init__(
        self,
        path: str,
        owner: Any,
        hidden: frozenset[str] = frozenset(),
        private: str = "__",
        *,
        attributes: bool = False,
        fixed: bool = False,
    ) -> None:
        self.path = path
        self._fixed = fixed
        self.owner = owner
        self._hidden = hidden
        self._private = private
        self._is_dict = isinstance(owner, dict) and not attributes
        self.variables: Mapping[str, Any] = owner if self._is_dict else _variables_of(owner)

    @property
    def is_of_buffers(self) -> bool:
        """Whether its variables are buffers of a module."""
        return f".{OF_BUFFERS}" in self.path

    @property
    def module(self) -> nn.Module | None:
        """The module of torch whose attributes it has; None if it is of something else, or of a wrapper."""
        is_module = isinstance(self.owner, nn.Module) and not is_torchs_wrapper(self.owner)
        return self.owner if is_module else None

    def may_lose(self, name: str) -> bool:
        """Whether a variable that is new may be deleted. What a module of Python's has is mostly its code.

        So it is with a class that a library has made, as ``fully_shard`` does. That may lose what it inherits
        as well: it got one of its own as it counted, as in ``type(self).calls += 1``.
        """
        if isinstance(self.owner, type) and not is_own_module(self.owner.__module__):
            return any(name in vars(base) for base in self.owner.__mro__[1:])
        return not (self._is_dict or isinstance(self.owner, ModuleType))

    def takes(self, name: str) -> bool:
        """Whether a variable can be given to it, which may be new."""
        return not self._fixed or name in self.variables

    def names(self) -> list[str]:
        """The names of its variables. What a module of Python's has is mostly its code, and left out."""
        hidden = self._hidden | counted_in(self.owner)
        own = (name for name in self.variables if not name.startswith(self._private))
        found = [name for name in own if name not in hidden]
        if isinstance(self.owner, ModuleType):
            return [name for name in found if not isinstance(self.variables[name], CODE)]
        return found

    def write(self, name: str, value: Any) -> None:
        """Give a variable a value; :data:`MISSING` deletes it."""
        if isinstance(self.owner, type):
            if value is not MISSING:
                setattr(self.owner, name, value)
            elif name in self.variables:
                delattr(self.owner, name)
            return
        variables = self.variables
        assert isinstance(variables, MutableMapping)
        if value is MISSING:
            variables.pop(name, None)
        else:
            variables[name] = value


class _Slots(MutableMapping[str, Any]):
    """The variables of an object that has slots, as ``vars()`` gives those of others."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # a frozen dataclass refuses it otherwise

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(attributes(self._owner))

    def __len__(self) -> int:
        return len(attributes(self._owner))


class Given(dict[str, Any]):
    """Arguments that a function has where a call does not give them, as far as they may change in themselves.

    Args:
        arguments: by name, all of them.
        give: gives the function another one.
    """

    def __init__(self, arguments: Mapping[str, Any], give: Callable[[str, Any], None]) -> None:
        super().__init__((name, one) for name, one in arguments.items() if changes_in_itself(one))
        self._give = give

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._give(name, value)


def defaults_of(function: FunctionType) -> Given:
    """Those of arguments by place, and by name only."""
    positional, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    code = function.__code__
    names = code.co_varnames[max(0, code.co_argcount - len(positional)) : code.co_argcount]

    def give(name: str, value: Any) -> None:
        if name in by_name:
            by_name[name] = value
        else:
            now = dict(zip(names, function.__defaults__ or (), strict=False))
            function.__defaults__ = (*(now | {name: value}).values(),)

    return Given({**dict(zip(names, positional, strict=False)), **by_name}, give)


def arguments_of(part: functools.partial[Any]) -> Given:
    """Those by place: its keywords are a dictionary of its own."""

    def give(name: str, value: Any) -> None:
        args = [*part.args]
        args[int(name)] = value
        made: Any = part  # typeshed does not have the call
        made.__setstate__((part.func, tuple(args), part.keywords, vars(part)))

    return Given({str(number): one for number, one in enumerate(part.args)}, give)


def _variables_of(owner: Any) -> Mapping[str, Any]:
    return _Slots(owner) if has_slots(owner) else vars(owner)


def is_mixed(container: Any) -> bool:
    """Whether a dictionary holds things of no known kind beside others, as in ``{"writer": ..., "step": 0}``.

    Each of its entries counts as a variable then.
    """
    return (
        isinstance(container, dict)
        and len(container) <= MOST_ELEMENTS
        and all(isinstance(key, str) for key in container)
        and not all(map(is_value, content_in(container)))
    )
