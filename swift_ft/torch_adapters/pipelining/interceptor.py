"""The interface through which the hook on torch's stages asks about each message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from swift_ft.logging import Direction, MessageKey


@dataclass(frozen=True, slots=True)
class Message:
    """A message between two stages.

    Attributes:
        key: names it.
        tensor: what is sent, or the buffer that is filled.
        peer: the rank on the other side.
    """

    key: MessageKey
    tensor: torch.Tensor
    peer: int


class MessageInterceptor(Protocol):
    """Decides about each message. The training thread makes all calls.

    Attributes:
        iteration: the running one; it is part of each message's key.
    """

    iteration: int

    def on_send(self, message: Message) -> bool:
        """A message is about to be sent; False to drop it."""

    def on_recv(self, message: Message) -> bool:
        """A message is about to be received; False if the buffer has been filled instead."""

    def on_wait(self) -> None:
        """The schedule is about to wait for messages, which :meth:`on_received` ends."""

    def on_received(self, message: Message) -> None:
        """A message has arrived and is about to be used."""

    def on_received_elsewhere(self, message: Message, checksum: int) -> None:
        """Another worker computed with this message. Of the tensor, only dtype and shape count."""

    def on_compute(self, stage: int, microbatch: int, direction: Direction) -> None:
        """A stage is about to compute a microbatch."""
