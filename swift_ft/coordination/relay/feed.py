"""The downward stream of a relay: blocks in order, and signs of life."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from swift_ft.coordination.relay.lines import Line
from swift_ft.network.messages import TEXT
from swift_ft.recovery.blocks import Block, block_to_text


class LineEndedError(ConnectionError):
    """The other side has closed the line."""


class SilentError(ConnectionError):
    """The other side has sent nothing for too long."""


class NotHereError(LookupError):
    """The relay does not have a block any more. The store may have it."""


class Feed:
    """The lower end of a line to a relay.

    One thread reads. Others may send, one at a time.

    Args:
        line: to the relay.
        machine: of the one that follows; empty for a worker.
        silence_s: a relay that sends nothing for so long is silent.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self, line: Line, machine: str, *, silence_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._line = line
        self._silence_s = silence_s
        self._now = now
        # Owner: the thread that reads. Others read `waits`.
        self._heard_at = now()
        self._next: int | None = None  # of the next block that comes, once it was asked for
        self._end: int | None = None  # what the relay has is before this number
        self._here_from: float = -math.inf
        self._snapshot: bool | None = None  # the relay's answer, once there is one
        self.waits = False
        """The relay itself waits for the journal: it is not the one that is slow."""
        line.send({"hello": machine})

    def append(self, block: Block) -> None:
        """Send events. They have arrived when they come back in a block.

        Raises:
            OSError: if the line has ended.
        """
        self._line.send({"append": True, TEXT: block_to_text(block)})

    def keep(self, key: str, value: str | None) -> None:
        """Say what was set in the store; None: the key was deleted.

        Raises:
            OSError: if the line has ended.
        """
        self._line.send({"kept": {key: value}})

    def try_send(self, message: dict[str, Any]) -> bool:
        """Send what may be lost, if that needs no waiting.

        Raises:
            OSError: if the line has ended.
        """
        return self._line.try_send(message)

    def begins_at_snapshot(self) -> bool:
        """Ask the relay, before anything else, whether the journal may have a snapshot.

        A relay that has read all of the journal knows that so short a journal has none.

        Raises:
            LineEndedError: if the line has ended.
            SilentError: if nothing has come for too long.
        """
        if self._next is not None:  # what was asked for has come, or is gone
            return True
        self._send({"snapshot": True})
        while self._snapshot is None:
            try:
                message = self._receive(math.inf)
            except TimeoutError:
                raise SilentError(f"nothing has come for {self._silence_s:g} s") from None
            if message is None:
                raise LineEndedError("the line has ended")
            self._take(message, -1)
        return self._snapshot

    def next(self, number: int, timeout_s: float) -> str | None:
        """Wait for a block. None if it is not there in time; 0 does not wait for one that is still to come.

        Raises:
            LineEndedError: if the line has ended.
            SilentError: if nothing has come for too long.
            NotHereError: if the relay does not have this block any more.
        """
        deadline = self._now() + timeout_s
        if self._next != number:
            self._ask(number)
        while True:
            try:
                message = self._receive(deadline)
            except TimeoutError:
                now = self._now()
                if now - self._heard_at >= self._silence_s:
                    raise SilentError(f"nothing has come for {self._silence_s:g} s") from None
                if now >= deadline and self._end is not None:
                    return None
                continue
            if message is None:
                raise LineEndedError("the line has ended")
            if (text := self._take(message, number)) is not None:
                return text
            if self._here_from > number:
                raise NotHereError(f"block {number} is before {self._here_from}")

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """The next message. The first answer is waited for, also beyond the deadline."""
        now = self._now()
        until = deadline if self._end is not None else math.inf
        left_s = max(0.0, min(until, self._heard_at + self._silence_s) - now)
        try:
            message = self._line.receive(left_s)
        except TimeoutError:
            raise
        except OSError as error:
            raise LineEndedError(str(error)) from error
        self._heard_at = self._now()
        return message

    def _ask(self, number: int) -> None:
        self._next, self._end, self._here_from = number, None, -math.inf
        self._send({"follow": number})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._line.send(message)
        except OSError as error:
            raise LineEndedError(str(error)) from error

    def _take(self, message: dict[str, Any], number: int) -> str | None:
        if "block" in message and message["block"] == number:
            self._next = number + 1
            text: str = message[TEXT]
            return text
        if "end" in message:
            self._end, self._here_from = message["end"], message["from"]
        if "snapshot" in message:
            self._snapshot = message["snapshot"]
        if "beat" in message:
            self.waits = message["waits"]
        return None

    def close(self) -> None:
        """End the line."""
        self._line.close()
