"""Flows: decisions without I/O. A flow yields each call that may wait, and is sent what that returned.

Whoever drives a flow makes the calls: a worker at once (:func:`perform`), a simulation when their time has
come, a test as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Call = partial
"""A call that may wait: for other workers, for the store, for the journal."""

Flow: TypeAlias = Generator[Callable[[], Any], Any, T]
"""Yields calls, is sent what they returned or has thrown into it what they raised, and returns a ``T``."""


def perform(flow: Flow[T]) -> T:
    """Make the calls of a flow, one after the other, in this thread."""
    try:
        call = next(flow)
        while True:
            try:
                result = call()
            except BaseException as error:
                call = flow.throw(error)
            else:
                call = flow.send(result)
    except StopIteration as end:
        value: T = end.value
        return value
