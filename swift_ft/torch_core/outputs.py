"""Tensors that a step gives to other workers, or gets from them, shown to listeners. Free when unused.

Whoever sends a message or contributes to a collective shows it just before. That costs one comparison unless
somebody listens, which is so only while a step is verified, or noted for an audit (`runtime/verify/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_GRADIENT = "the gradient of "


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

_listeners: dict[str, Listener] = {}


def gradient_of(parameter: str) -> str:
    """The name among an output's tensors of what a worker contributes to the average of a gradient."""
    return f"{_GRADIENT}{parameter}"


def is_gradient(name: str) -> bool:
    """Whether :func:`gradient_of` has made this name."""
    return name.startswith(_GRADIENT)


def are_watched() -> bool:
    """Whether anybody wants to see outputs: else they need not be made."""
    return bool(_listeners)


def show(output: Output) -> None:
    """Show an output to all who listen."""
    for listener in _listeners.values():
        listener(output)


def listen(who: str, listener: Listener | None) -> None:
    """Have :func:`show` call a listener, in the place of an earlier one of the same name. None removes it."""
    if listener is None:
        _listeners.pop(who, None)
    else:
        _listeners[who] = listener
