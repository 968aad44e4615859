"""Shows the package's log on stderr: in swift-run, its agents and its workers.

A program that uses the library without swift-run configures ``logging.getLogger("swift_ft")`` itself.
"""

from __future__ import annotations

import logging
from typing import TextIO


def show_log(prefix: str) -> None:
    """Show records of INFO and above on stderr, as ``prefix: message``.

    Does not touch the root logger. If the user has given the root logger a handler that shows records, that
    handler shows ours too, and this one stays silent: no line appears twice.

    Args:
        prefix: what each line begins with. A second call replaces the handler of the first one.
    """
    logger = logging.getLogger("swift_ft")
    for handler in logger.handlers[:]:
        if isinstance(handler, _ConsoleHandler):
            logger.removeHandler(handler)
    logger.addHandler(_ConsoleHandler(prefix))
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    def __init__(self, prefix: str) -> None:
        super().__init__()  # writes to what sys.stderr is now
        self.setLevel(logging.INFO)
        self.setFormatter(logging.Formatter(f"{prefix}: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not _root_shows_records():
            super().emit(record)


def _root_shows_records() -> bool:
    """Whether the root logger has a handler other than for a file."""
    if not logging.getLogger("swift_ft").propagate:
        return False
    return any(not isinstance(handler, logging.FileHandler) for handler in logging.getLogger().handlers)
