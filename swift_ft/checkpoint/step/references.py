"""Names in the place of the state's parameters and modules, of which another process has others."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from swift_ft.checkpoint.step.kinds import is_fixed

UNKNOWN: Any = object()
"""In the place of a value that cannot be copied, or of one that cannot be made."""
PARAMETER = "swift_ft.parameter"
"""The key of a parameter's name."""
_ID, _MODULE, _ID_OF_MODULE = "swift_ft.id", "swift_ft.module", "swift_ft.id_of_module"
_WEAK = "swift_ft.weak"
"""Before the name of what a weak reference leads to."""
LEAST_ADDRESS = 2**32
"""Smaller numbers are no ``id()``."""


class References:
    """Knows the state's parameters and modules by name.

    Args:
        parameters: by name.
        modules: the outermost ones, by name.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter] | None = None,
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._parameters = parameters or {}
        self._roots = modules or {}

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return {
            f"{part}.{name}": module
            for part, root in self._roots.items()
            for name, module in root.named_modules()
        }

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._parameters.items()}

    @cached_property
    def _names_of_modules(self) -> dict[int, str]:
        return {id(module): name for name, module in reversed(self._modules.items())}

    def of_parameter(self, tensor: torch.Tensor) -> dict[str, str] | None:
        """A parameter's name, in a dictionary that tells it from other values; None of any other tensor."""
        name = self._names.get(id(tensor))
        return None if name is None else {PARAMETER: name}

    def parameter(self, value: Mapping[str, str]) -> Any:
        """The parameter of this process. The inverse of :meth:`of_parameter`, or :data:`UNKNOWN`."""
        return self._parameters.get(value[PARAMETER], UNKNOWN)

    def of_key(self, key: Any) -> Any:
        """The key of a dictionary in another process: names of parameters and modules, and of their ``id()``.

        :data:`UNKNOWN` where no other process could look it up.
        """
        if type(key) is tuple:
            inner = tuple(map(self.of_key, key))
            return UNKNOWN if any(one is UNKNOWN for one in inner) else inner
        if isinstance(key, torch.Tensor):
            return self._named(PARAMETER, self._names, key)
        if isinstance(key, nn.Module):
            return self._named(_MODULE, self._names_of_modules, key)
        if type(key) is int and key in self._names:
            return (_ID, self._names[key])
        if type(key) is int and key >= LEAST_ADDRESS and key in self._names_of_modules:
            return (_ID_OF_MODULE, self._names_of_modules[key])
        if isinstance(key, weakref.ref):
            inner = UNKNOWN if key() is None else self.of_key(key())
            return UNKNOWN if inner is UNKNOWN else (_WEAK, inner)
        # For mypy the functions have unlike signatures, so that they could never be the same one.
        by_identity = type(key).__hash__ is object.__hash__  # type: ignore[comparison-overlap]
        return UNKNOWN if by_identity and not is_fixed(key) else key

    def are_in(self, keys: Mapping[Any, Any]) -> bool:
        """Whether plain keys have the ``id()`` of a parameter or of a module among them."""
        return not all(names.keys().isdisjoint(keys) for names in (self._names, self._names_of_modules))

    def words_of(self, key: Any) -> str | None:
        """The name of a parameter or a module of the state; None of all else."""
        if isinstance(key, torch.Tensor | nn.Module):
            return self.words_of_number(id(key))
        return None

    def words_of_number(self, number: int) -> str | None:
        """The name of a parameter or a module by its ``id()``; None if it is that of nothing in the state."""
        name = self._names.get(number) or self._names_of_modules.get(number)
        return None if name is None else name.removesuffix(".")

    def _named(self, kind: str, names: Mapping[int, str], key: object) -> Any:
        return (kind, names[id(key)]) if id(key) in names else UNKNOWN

    def key(self, key: Any) -> Any:
        """The inverse of :meth:`of_key`; :data:`UNKNOWN` if this process has nothing of that name."""
        if type(key) is not tuple:
            return key
        if len(key) == 2 and key[0] in (PARAMETER, _ID):
            parameter = self._parameters.get(key[1], UNKNOWN)
            return parameter if parameter is UNKNOWN or key[0] == PARAMETER else id(parameter)
        if len(key) == 2 and key[0] in (_MODULE, _ID_OF_MODULE):
            module = self._modules.get(key[1], UNKNOWN)
            return module if module is UNKNOWN or key[0] == _MODULE else id(module)
        if len(key) == 2 and key[0] == _WEAK:
            held = self.key(key[1])
            return UNKNOWN if held is UNKNOWN else weakref.ref(held)
        inner = tuple(map(self.key, key))
        return UNKNOWN if any(one is UNKNOWN for one in inner) else inner
