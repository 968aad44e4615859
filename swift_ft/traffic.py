"""What the hook on torch's stages shows of each message, and asks about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from swift_ft.logging import Direction, MessageKey

__all__ = ["Message", "Traffic"]


@dataclass(frozen=True, slots=True)
class Message:
    """A message on its way: its key, and the tensor that is sent or the buffer that is filled.

    ``peer`` is the rank on the other side.
    """

    key: MessageKey
    tensor: torch.Tensor
    peer: int


class Traffic(Protocol):
    """What the hook asks about each message. All calls come from the training thread."""

    iteration: int

    def sending(self, message: Message) -> bool:
        """A message is about to be sent; False to drop it."""

    def receiving(self, message: Message) -> bool:
        """A message is about to be received; False when the buffer was filled instead."""

    def waiting(self) -> None:
        """The schedule is about to wait for messages, which :meth:`received` ends."""

    def received(self, message: Message) -> None:
        """A message has arrived and is about to be used."""

    def received_elsewhere(self, message: Message, checksum: int) -> None:
        """Another worker computed with this message; the tensor has its dtype and shape only."""

    def computing(self, stage: int, microbatch: int, direction: Direction) -> None:
        """A stage is about to compute a microbatch."""
