"""Hooks in the script's modules: its own, and those of a session, which copies of these modules do not have.

A script copies its model to keep the best one or to average it, and saves whole modules. A hook of the
session would come along, and all that the session holds with it.

Private parts used (tested on torch 2.11 to 2.14): the dictionaries in which modules, parameters and
optimizers keep their hooks (``_KEPT``) and how they are called (``_BESIDE``), and ``Module._parameters``.
``RemovableHandle.next_id`` counts the hooks that were ever registered anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_OTHERS = (
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
_KEPT = tuple(dict.fromkeys((*_OF_MODULES, *_OF_OTHERS)))

_BESIDE = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
"""Dictionaries with the same keys, beside one of hooks."""

Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class KeptHooks:
    """One dictionary of hooks.

    Attributes:
        owner: a module, a tensor or an optimizer.
        kind: the name of the dictionary there.
        hooks: by number, in the order in which they are called.
        beside: dictionaries that say of some of them how they are called.
    """

    owner: Any
    kind: str
    hooks: dict[int, Hook]
    beside: tuple[dict[int, Any], ...]

    def fill(self, hooks: Mapping[int, Hook], beside: tuple[Mapping[int, Any], ...]) -> None:
        """Have these instead. Handles stay those of their hooks."""
        for dictionary, content in zip((self.hooks, *self.beside), (hooks, *beside), strict=True):
            dictionary.clear()
            dictionary.update(content)


def kept_hooks(owner: nn.Module | torch.Tensor | Optimizer) -> Iterator[KeptHooks]:
    """The dictionaries of an owner that are not empty: of a module, without those of its parameters."""
    for kind in _OF_MODULES if isinstance(owner, nn.Module) else _OF_OTHERS:
        if hooks := getattr(owner, kind, None):
            beside = (getattr(owner, name, None) for name in _BESIDE.get(kind, ()))
            yield KeptHooks(owner, kind, hooks, tuple(one for one in beside if one is not None))


def hooks_ever_registered() -> int:
    """As long as it is the same, nobody has registered a hook anywhere."""
    return RemovableHandle.next_id


def hooks_of(owner: nn.Module | Optimizer) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that a module calls, or its parameters, or an optimizer: each with a name to tell it by.

    Args:
        owner: a module, without those in it, or an optimizer.
    """
    parameters = owner._parameters if isinstance(owner, nn.Module) else {}
    for prefix, one in [("", owner), *((f"{name}.", parameter) for name, parameter in parameters.items())]:
        for hooks in (getattr(one, kind, None) for kind in _KEPT):
            for hook in (hooks or {}).values():
                yield prefix + getattr(hook, "__name__", type(hook).__name__), hook


class OwnHook:
    """Calls a function. In a copy of its module, or one that is read from a file, it does nothing.

    Args:
        function: a forward pre-hook.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As torch calls a hook."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, _: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Python's own, for a reader without this package: `{}.get(module, inputs)` gives the inputs back.
        return getattr, ({}, "get")


def _nothing(*_: object, **__: object) -> None:
    """In a copy."""
