"""Bytes that have arrived in the original, as logs say: an audit compares them with what was sent.

Else a value that was changed on its way would look like a mistake of the machine that has computed with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swift_ft.errors import LogMissingError
from swift_ft.logging import LogReader, MessageKey
from swift_ft.observe.waits import waiting

_PATIENCE_S = 60.0
"""For the last segments of the interval to become readable. Others than those of senders may come later."""
_POLL_S = 0.2


@dataclass
class Arrivals:
    """Checksums of what workers have received.

    Attributes:
        log: of the worker that is audited, and of those next to it.
        patience_s: how long to wait until the log has one, all in all.
    """

    log: LogReader
    patience_s: float = _PATIENCE_S
    _until_s: float | None = None  # monotonic, from the first wait on

    def of_message(self, key: MessageKey) -> int:
        """The checksum of a message where it arrived.

        Raises:
            LogMissingError: nothing says what has arrived, so nobody could be blamed.
        """
        return self._known(self.log.receipt, key)

    def of_result(self, key: MessageKey) -> int:
        """The checksum of what an operation of the script has given to a worker. Raises as the other one."""
        return self._known(self.log.checksum, key)

    def _known(self, find: Callable[[MessageKey], int | None], key: MessageKey) -> int:
        if (found := find(key)) is not None:
            return found
        if self._until_s is None:
            self._until_s = time.monotonic() + self.patience_s
        with waiting(f"a log to say which bytes have arrived ({key})", self.patience_s):
            while time.monotonic() < self._until_s:
                time.sleep(_POLL_S)
                self.log.refresh()
                if (found := find(key)) is not None:
                    return found
        raise LogMissingError(
            f"no log says which bytes have arrived ({key}), so a difference could be the link's", key=key
        )
