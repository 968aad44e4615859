"""Tensors that a step gives to other workers, or gets from them, shown to a listener. Free when unused.

Whoever sends a message or contributes to a collective shows it just before. That costs one comparison unless
a listener is installed, which is so only while a step is verified (`runtime/verify/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Output:
    """Tensors on their way.

    Attributes:
        place: names the message or the collective, the same each time that the step is computed.
        tensors: by the names that a user is told.
        members: global ranks that the tensors reach unseen, as they do in a collective; empty for a message,
            which its receiver shows, too.
        received: the tensors have come from another worker.
    """

    place: str
    tensors: Mapping[str, torch.Tensor]
    members: tuple[int, ...] = ()
    received: bool = False


Listener = Callable[[Output], None]
"""Called before the tensors go, or when they have arrived, in the thread that communicates."""

_listener: Listener | None = None


def are_watched() -> bool:
    """Whether anybody wants to see outputs: else they need not be made."""
    return _listener is not None


def show(output: Output) -> None:
    """Show an output to the listener, if there is one."""
    if _listener is not None:
        _listener(output)


def listen(listener: Listener | None) -> None:
    """Install the listener that :func:`show` calls. None removes it."""
    global _listener
    _listener = listener
