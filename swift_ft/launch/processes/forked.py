"""The end of a forked child that cannot begin what it was forked for."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator

from swift_ft.config.exit_codes import EXIT_NOT_STARTED
from swift_ft.errors import SwiftError, first_line

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def ending_here(what: str) -> Iterator[None]:
    """Let no error of a child go on into the code of its parent, which the child has a copy of.

    There it would be taken for one of the parent's own: the standby takes an ``OSError`` for the agent's end,
    and ends with a code that says success.

    Args:
        what: is tried, in words, for the one line that is logged.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        unforeseen = not isinstance(error, OSError | SwiftError)  # then the place in our own code matters
        why = first_line(error)
        _logger.exception("%s: %s", what, why, exc_info=unforeseen, extra={"event": "process_not_started"})
    os._exit(EXIT_NOT_STARTED)
