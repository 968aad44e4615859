"""Hooks in the script's modules, which copies of these modules do not have.

A script copies its model to keep the best one or to average it, and saves whole modules. A hook of the
session would come along, and all that the session holds with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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

    def __copy__(self) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Python's own, for a reader without this package: `{}.get(module, inputs)` gives the inputs back.
        return getattr, ({}, "get")


def _nothing(*_: object, **__: object) -> None:
    """In a copy."""
