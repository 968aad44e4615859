"""A forked child's copies of its parent: the code, where it cannot begin its own, and the garbage."""

from __future__ import annotations

import contextlib
import gc
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


def leave_garbage_to_parent() -> None:
    """Let no child that is forked from this process free what was garbage in it already.

    A process group of gloo waits for its threads as it is freed. A child has none of them, and would wait for
    ever: a loader's process that collects garbage, right after a recovery has dropped a group.
    """
    os.register_at_fork(after_in_child=gc.freeze)
