"""The live view of a run: which machines train, are dead, or replay. It reads and changes nothing.

``swift-run --status RUN`` attaches one from anywhere that reaches the run's rendezvous store. ``watch.py``
reads the run; this module draws it.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swift_ft.cli.news import News, Weight
from swift_ft.cli.watch import Seen, View, Watch
from swift_ft.config.store_address import StoreAddress
from swift_ft.errors import UsageError
from swift_ft.launch.rendezvous.store_service import is_listening
from swift_ft.recovery.job_state import Phase
from swift_ft.units import counted, format_seconds

_STYLES = {
    "live": "green",
    "finished": "green",
    "replays": "yellow",
    "loads": "yellow",
    "helps": "yellow",
    "dead": "red",
}
_LINE_EVERY = 10  # iterations, without a terminal
_REDRAW_S = 0.1
_SILENT_S = 5.0
"""The longest time that the rendezvous store may take to answer before the view says so."""
_LAST_LOOK_S = 2.0


def render(view: View, now: float, silent_s: float = 0.0) -> RenderableType:
    """The view as a rich object: a bar per machine, and the last events.

    Args:
        view: what is drawn.
        now: Unix time.
        silent_s: seconds since the rendezvous store answered; it is mentioned if that is long.
    """
    table = Table.grid(padding=(0, 2))
    total = view.total
    for row in view.rows():
        style = _STYLES.get(row.words.split()[0].rstrip(","), "cyan")
        bar = ProgressBar(
            total=total or max(row.iteration, 1),
            completed=row.iteration,
            width=40,
            complete_style=style,
            finished_style=style,
        )
        count = f"{row.iteration}/{total}" if total else f"iteration {row.iteration}"
        table.add_row(f"machine {row.slot}", bar, count, Text(row.words, style=style))
    spares = len(view.state.membership.spares)
    elapsed = now - view.started_at if view.started_at is not None else 0.0
    head = f"generation {view.state.generation}, {view.state.phase}, {format_seconds(elapsed)}"
    head += f", {counted(spares, 'spare machine')}" if spares else ""
    lines = [_line(news.at, news.text) for news in view.recent]
    if silent_s > _SILENT_S:
        lines.append(f"the rendezvous store has been silent for {format_seconds(silent_s)}")
    recent = Text("\n".join(lines), style="dim", no_wrap=True)
    return Group(Text(head, style="bold"), table, Text(), recent)


def _line(at: float, text: str) -> str:
    return f"{at:8.2f} s  {text}"


class _Looks:
    """Looks at the run in a thread of its own: a store that is frozen must not freeze the view, or Ctrl-C."""

    def __init__(self, watch: Watch, poll_s: float) -> None:
        self._watch = watch
        self._poll_s = poll_s
        self._found: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._answered_at = time.monotonic()
        self._thread = threading.Thread(target=self._look, name="swift-view", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the store answered."""
        return time.monotonic() - self._answered_at

    def news(self, wait_s: float = 0.0) -> list[News]:
        """All that is new, after a wait for it; the view is up to date afterwards."""
        news: list[News] = []
        try:
            news += self._watch.apply(self._found.get(timeout=wait_s))
            while True:
                news += self._watch.apply(self._found.get_nowait())
        except queue.Empty:
            return news

    def close(self) -> list[News]:
        """Look for the last time; returns what was new."""
        self._closed.set()
        self._thread.join(_LAST_LOOK_S)
        return self.news()

    def _look(self) -> None:
        going_on = True
        while going_on:
            going_on = not self._closed.wait(self._poll_s)
            seen = self._watch.look()
            self._answered_at = time.monotonic()
            if seen.journal.entries or seen.progress or seen.lost:
                self._found.put(seen)
            going_on = going_on and not seen.lost


def show(
    watch: Watch, console: Console, running: Callable[[], bool], *, poll_s: float = 0.05, quiet: bool = False
) -> None:
    """Show a run until it ends: as a live view on a terminal, else as a line per event.

    Args:
        watch: reads the run.
        console: where to.
        running: whether to go on; asked again and again.
        poll_s: seconds between two looks at the run.
        quiet: only a line for each loss, what is done about it, and the end.
    """
    looks = _Looks(watch, poll_s)
    if not console.is_terminal or quiet:
        _show_lines(watch, looks, console, running, quiet)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        drawn = 0.0
        while running():
            looks.news(_REDRAW_S)
            if time.monotonic() - drawn >= _REDRAW_S:
                drawn = time.monotonic()
                live.update(render(watch.view, time.time(), looks.silent_s), refresh=True)
        looks.close()
        live.update(render(watch.view, time.time()), refresh=True)


def _show_lines(
    watch: Watch, looks: _Looks, console: Console, running: Callable[[], bool], quiet: bool
) -> None:
    shown = 0
    going_on = True
    while going_on:
        going_on = running()
        for news in looks.news(_REDRAW_S) if going_on else looks.close():
            if not quiet or news.weight > Weight.ROUTINE:
                _print(console, news)
        done = min((row.iteration for row in watch.view.rows()), default=0)
        if not quiet and done >= shown + _LINE_EVERY and watch.view.state.phase == Phase.LIVE:
            shown = done - done % _LINE_EVERY
            at = time.time() - (watch.view.started_at or 0.0)
            _print(console, News(at, f"{shown} iterations are done"))
    if quiet and watch.view.state.phase == Phase.ENDED:  # how it ended is said in any case
        _print(console, watch.view.recent[-1])


def _print(console: Console, news: News) -> None:
    console.print(_line(news.at, news.text), markup=False, highlight=False, soft_wrap=True)


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
        show(watch, console, lambda: not watch.over, quiet=_is_ci())
    except KeyboardInterrupt:
        console.print(f"the view of {watch.run_id} ends; the run goes on", highlight=False)
        return
    if watch.view.state.phase != Phase.ENDED:
        console.print(
            f"the rendezvous store at {address} is gone: the run has ended, or that host is lost",
            highlight=False,
            soft_wrap=True,
        )


def _is_ci() -> bool:
    """Whether a continuous integration service reads the output: most of them set ``CI``."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
