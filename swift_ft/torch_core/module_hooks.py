"""Hooks in the script's modules: its own, and those of a session, which copies of these modules do not have.

A script copies its model to keep the best one or to average it, and saves whole modules. A hook of the
session would come along, and all that the session holds with it.

Private parts used (tested on torch 2.11 to 2.14): the dictionaries in which modules, parameters and
optimizers keep their hooks (``_KEPT``), and ``Module._parameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

_KEPT = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)


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
