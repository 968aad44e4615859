"""Tells another machine what this one has set in the rendezvous store: the holder of its keys.

Who that is follows from the state (`recovery/holders.py`). If a machine is lost, its holder goes on with its
keys as its own, and tells the next one of them. It costs a message per change, and nothing waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from swift_ft.coordination.kept_keys import KeptKeys
from swift_ft.coordination.relay.lines import Line
from swift_ft.errors import first_line
from swift_ft.recovery.holders import fenced_between, holder_of
from swift_ft.recovery.job_state import State

_logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""After so long a holder that could not be told is tried again."""
_LONG_S = 3600.0
_PIECE_CHARS = 1 << 20
"""Of the values in one message."""


class KeyHolding:
    """One agent's side that tells.

    Args:
        kept: the keys.
        connect: opens a line to a machine's relay, by its address.
    """

    def __init__(self, kept: KeptKeys, connect: Callable[[str], Line]) -> None:
        self._kept = kept
        self._connect = connect
        # Owner: the journal thread. The other one reads it.
        self._wanted: tuple[str, str, str] | None = None  # this machine, the holder, and its address
        # Owner: the thread that tells.
        self._told: tuple[str, str, str] | None = None
        self._line: Line | None = None
        threading.Thread(target=self._run, name="swift-key-holding", daemon=True).start()

    def look(self, before: State, after: State, machine: str) -> None:
        """Take over the keys of machines that were lost, and choose the holder. In the journal thread."""
        for lost in fenced_between(before, after):
            adopted = self._kept.adopt(lost)
            if not adopted and lost not in before.membership.slots and after.membership.first == machine:
                self._kept.put_machine(lost)  # it never had workers, so it has set nothing that matters
        holder = holder_of(after, machine)
        address = after.membership.addresses.get(holder, "") if holder is not None else ""
        wanted = (machine, holder, address) if holder is not None and address else None
        if wanted != self._wanted:
            self._wanted = wanted
            self._kept.wake()

    def _run(self) -> None:
        while True:
            self._kept.wait_for_news(_LONG_S)
            try:
                self._tell()
            except OSError as error:  # it is lost, perhaps: then the journal will say so
                _logger.debug("the keys of this machine are not held: %s", first_line(error))
                self._end()
                time.sleep(_AGAIN_S)
                self._kept.wake()

    def _tell(self) -> None:
        wanted = self._wanted
        if wanted != self._told:
            if self._line is not None:
                with contextlib.suppress(OSError):  # it may be the one that is lost
                    self._line.send({"release": True})
            self._end()
            if wanted is None:
                return
            machine, _, address = wanted
            self._line = self._connect(address)
            self._line.send({"hello": machine})
            self._line.send({"hold": {}, "anew": True})
            self._send(self._kept.take_all())
            self._told = wanted
        else:
            news = self._kept.take_news()
            if self._line is not None:
                self._send(news)

    def _send(self, values: dict[str, str | None]) -> None:
        assert self._line is not None
        piece: dict[str, str | None] = {}
        size = 0
        for key, value in values.items():
            piece[key] = value
            size += len(key) + len(value or "")
            if size > _PIECE_CHARS:
                self._line.send({"hold": piece})
                piece, size = {}, 0
        if piece:
            self._line.send({"hold": piece})

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, self._told = None, None
