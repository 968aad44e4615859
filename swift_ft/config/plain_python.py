"""A script that is started by ``python`` instead of ``swift-run``: its mistakes end it with one line, too."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.errors import NotLaunchedError, UsageError

NOT_LAUNCHED = (
    "A swift_ft.Session needs the launcher: start the script with "
    "`swift-run --standalone --machines N script.py` instead of `python` or `torchrun`."
)
_NO_RANK = "Error initializing torch.distributed using env:// rendezvous"


def say_mistakes_in_one_line() -> None:
    """Install an exception hook, unless somebody has one, or the script runs under swift-run."""
    if "SWIFT_CONTEXT" not in os.environ and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if str(error).startswith(_NO_RANK):  # the script joins its group before it makes the session
        error = NotLaunchedError(NOT_LAUNCHED)
    if not isinstance(error, UsageError) or hasattr(sys, "ps1"):  # a prompt goes on
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"swift_ft: {error}\n")
    raise SystemExit(EXIT_USAGE)
