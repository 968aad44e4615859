"""``swift-run --status RUN``: a live view of a run from anywhere that reaches its rendezvous store."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from swift_ft.cli.live import is_ci, show
from swift_ft.cli.watch import View, Watch
from swift_ft.config.store_address import StoreAddress
from swift_ft.errors import UsageError
from swift_ft.launch.rendezvous.store_service import is_listening
from swift_ft.recovery.job_state import Phase


def add_status_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--status``, with which the script may be missing."""
    parser.add_argument_group("a run that exists").add_argument(
        "--status",
        action=_Status,
        metavar="RUN",
        help="start nothing: show the run of that name (--rdzv-id) at --rdzv-endpoint until it ends. "
        "Ctrl-C ends the view, not the run",
    )


class _Status(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        for action in parser._actions:
            if not action.option_strings:  # the script and its arguments
                action.required = False


def show_status(name: str, address: StoreAddress, console: Console | None = None) -> None:
    """Show a run until it ends, or until Ctrl-C.

    Args:
        name: the run's name; of several runs the newest is shown.
        address: where the rendezvous store is.
        console: where to; stdout by default.

    Raises:
        UsageError: if there is no such run, or nothing listens there.
        RendezvousLostError: if what listens there does not answer.
    """
    if not is_listening(address):
        raise UsageError(
            f"No rendezvous store answers at {address}: the run has ended, or check --rdzv-endpoint."
        )
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C also ends a wait for the store
    watch = Watch(address, name, View())
    if not watch.exists:
        raise UsageError(f"There is no run {name!r} at {address}: check --status and --rdzv-endpoint.")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = console or Console()
    try:
        show(watch, console, lambda: not watch.over, quiet=is_ci())
    except KeyboardInterrupt:
        console.print(f"the view of {watch.run_id} ends; the run goes on", highlight=False)
        return
    if watch.view.state.phase != Phase.ENDED:
        console.print(
            f"the rendezvous store at {address} is gone: the run has ended, or that host is lost",
            highlight=False,
            soft_wrap=True,
        )
