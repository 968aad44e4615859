"""The live view of a run: who trains, who is dead, who replays. Reads along and changes nothing.

python -m swift_ft.cli.live $(cat FILE)     where FILE is that of swift-run --endpoint-out

Journal and progress go into :class:`View`, which is pure; :class:`Watch` reads them, :func:`show` draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch.distributed import DistError

from swift_ft.cli.words import counted, sentences
from swift_ft.config import EXIT_USAGE
from swift_ft.errors import SwiftError
from swift_ft.launch.store_service import connect
from swift_ft.recovery.events import Entry
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.journal import Journal
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.protocol import step

__all__ = ["Progress", "Row", "View", "Watch", "format_bytes", "format_seconds", "show"]

_STYLES = {
    "live": "green",
    "finished": "green",
    "replays": "yellow",
    "loads": "yellow",
    "helps": "yellow",
    "dead": "red",
}
_EVENTS_SHOWN = 9
_LINE_EVERY = 10  # iterations, where there is no terminal
_FIRST_EVENT_S = 60.0
_CONNECT_S = 10.0

# --------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker told last.

    Attributes:
        iteration: completed iterations of its state.
        mode: ``live``, ``replay``, ``waiting``, ``loading`` or ``finished``.
        at: when it was told, or seen, in Unix time.
        bytes_logged: payload that it has logged, where it says so.
    """

    iteration: int
    mode: str
    at: float
    bytes_logged: int | None = None

    @classmethod
    def from_json(cls, text: bytes | str, seen_at: float) -> Progress:
        """Reads what the worker wrote."""
        facts = json.loads(text)
        return cls(facts["iteration"], facts["mode"], facts.get("at", seen_at), facts.get("bytes_logged"))


@dataclass(frozen=True, slots=True)
class Row:
    """One machine, as shown: completed iterations, and its condition in words."""

    slot: int
    iteration: int
    words: str


class View:
    """What is known of a run. Pure: fed with entries of the journal and with the workers' progress.

    Args:
        iterations: of the whole run, if known.

    Attributes:
        state: the protocol's.
        progress: by rank.
        news: the last events in words, with their times.
    """

    def __init__(self, iterations: int | None = None) -> None:
        self.iterations = iterations
        self.state = State()
        self.progress: dict[int, Progress] = {}
        self.news: deque[tuple[float, str]] = deque(maxlen=_EVENTS_SHOWN)
        self.began: float | None = None

    def happened(self, entry: Entry) -> list[tuple[float, str]]:
        """Take the next entry of the journal; returns what is new in words."""
        self.began = entry.at if self.began is None else self.began
        before, self.state = self.state, step(self.state, entry.event)
        new = [(entry.at - self.began, text) for text in sentences(before, self.state, entry.event)]
        self.news.extend(new)
        return new

    def rows(self) -> list[Row]:
        """One row per machine, by slot."""
        return [self._row(slot) for slot in range(self.state.machines)]

    def _row(self, slot: int) -> Row:
        told = [p for rank in self.state.ranks_of(slot) if (p := self.progress.get(rank)) is not None]
        slowest = min(told, key=lambda p: p.iteration, default=Progress(0, "", 0.0))
        return Row(slot, slowest.iteration, self._condition(slot, slowest))

    def _condition(self, slot: int, slowest: Progress) -> str:
        """The protocol's word counts first: a worker's own may be that of its dead predecessor."""
        state = self.state
        ranks = set(state.ranks_of(slot))
        newcomer = state.generation > 1 and state.launched[slot] == state.generation
        if state.members[slot] is None:
            return "dead, a replacement is awaited" if state.generation else "not here yet"
        match state.phase:
            case Phase.FORMING:
                return "waiting"
            case Phase.AGREEING if ranks <= state.reports.keys():
                return "replacement, joined" if newcomer else "waiting"
            case Phase.AGREEING:
                return "replacement, starts" if newcomer else "starts" if state.generation == 1 else "leaves"
            case Phase.RECOVERING if state.plan is not None and not ranks <= state.ready:
                return _task_in_words(state.plan, min(ranks - state.ready), slowest)
            case Phase.RECOVERING:
                return "waiting"
            case Phase.LIVE:
                return "finished" if ranks <= state.finished else "live"
        return "finished" if state.verdict is not None and state.verdict.ok else "stopped"


def _task_in_words(plan: Plan, rank: int, progress: Progress) -> str:
    task = plan.tasks[rank]
    shared = plan.shared_by(rank)
    if shared is not None and rank in shared.helpers:
        return f"helps {' and '.join(f'worker {owner}' for owner in shared.owners)}"
    if progress.mode == "replay":
        return f"replays {progress.iteration - task.begin + 1} of {task.replay_until - task.begin}"
    return "starts" if task.load is None else f"loads the checkpoint of iteration {task.load}"


# ------------------------------------------------------------------------------------------- the drawing


def format_seconds(seconds: float) -> str:
    """``0.012 s``, ``3.4 s``, ``2 min 5 s``."""
    if round(seconds) >= 100:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def format_bytes(count: float) -> str:
    """``512 B``, ``1.5 kB``, ``230 MB``: powers of ten, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    digits = 0 if unit == "B" or count >= 99.5 else 1
    return f"{count:.{digits}f} {unit}"


def render(view: View, now: float) -> RenderableType:
    """The view as rich draws it: a bar per machine, and the last events."""
    table = Table.grid(padding=(0, 2))
    for row in view.rows():
        style = _STYLES.get(row.words.split()[0].rstrip(","), "cyan")
        bar = ProgressBar(
            total=view.iterations or max(row.iteration, 1),
            completed=row.iteration,
            width=40,
            complete_style=style,
            finished_style=style,
        )
        count = f"{row.iteration}/{view.iterations}" if view.iterations else f"iteration {row.iteration}"
        table.add_row(f"machine {row.slot}", bar, count, Text(row.words, style=style))
    spares = len(view.state.spares)
    elapsed = now - view.began if view.began is not None else 0.0
    head = f"generation {view.state.generation}, {view.state.phase}, {format_seconds(elapsed)}"
    head += f", {counted(spares, 'spare machine')}" if spares else ""
    news = Text("\n".join(_line(at, text) for at, text in view.news), style="dim", no_wrap=True)
    return Group(Text(head, style="bold"), table, Text(), news)


def _line(at: float, text: str) -> str:
    return f"{at:8.2f} s  {text}"


# ------------------------------------------------------------------------------------------ the watching


class Watch:
    """Reads journal and progress of a run, without taking part in it.

    Args:
        endpoint: ``host:port`` of the rendezvous store.
        run_id: name of the run.
        view: is kept up to date by :meth:`poll`.
        on_progress: told whenever a worker's progress has changed.

    Raises:
        RendezvousLostError: if nothing answers at the endpoint.
        ValueError: if the endpoint is no ``host:port``.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        view: View,
        on_progress: Callable[[int, Progress], None] | None = None,
    ) -> None:
        host, _, port = endpoint.rpartition(":")
        client = partial(connect, host, int(port), run_id, timeout_s=_CONNECT_S)
        self.view = view
        self.lost = False
        self._on_progress = on_progress
        self._store = client()
        self._journal = Journal(client, by="view")
        self._position = 0
        self._texts: dict[int, bytes] = {}

    def poll(self) -> list[tuple[float, str]]:
        """Take in what is new; returns it in words, with the seconds since the run began."""
        news: list[tuple[float, str]] = []
        if self.over:
            return news
        try:
            while self._journal.has(self._position):
                news += self.view.happened(self._journal.read(self._position))
                self._position += 1
            self._read_progress()
        except (SwiftError, DistError, RuntimeError):
            self.lost = True  # the store ends with its run
        return news

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.lost or self.view.state.phase == Phase.ENDED

    def _read_progress(self) -> None:
        known = [r for r in range(self.view.state.world) if r in self._texts or self._told(r)]
        texts = self._store.multi_get([f"progress/{rank}" for rank in known]) if known else []
        now = time.time()
        for rank, text in zip(known, texts, strict=True):
            if text != self._texts.get(rank):
                self._texts[rank] = text
                self.view.progress[rank] = progress = Progress.from_json(text, now)
                if self._on_progress is not None:
                    self._on_progress(rank, progress)

    def _told(self, rank: int) -> bool:
        return self._store.check([f"progress/{rank}"])


def show(watch: Watch, console: Console, running: Callable[[], bool], *, poll_s: float = 0.05) -> None:
    """Show a run for as long as it runs: a live view on a terminal, else a line per event."""
    if not console.is_terminal:
        _show_lines(watch, console, running, poll_s)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        drawn = 0.0
        while running():
            watch.poll()
            if time.monotonic() - drawn >= 0.1:
                drawn = time.monotonic()
                live.update(render(watch.view, time.time()), refresh=True)
            time.sleep(poll_s)
        watch.poll()
        live.update(render(watch.view, time.time()), refresh=True)


def _show_lines(watch: Watch, console: Console, running: Callable[[], bool], poll_s: float) -> None:
    shown = 0
    while True:
        going_on = running()
        for at, text in watch.poll():
            console.print(_line(at, text), markup=False, highlight=False, soft_wrap=True)
        done = min((row.iteration for row in watch.view.rows()), default=0)
        if done >= shown + _LINE_EVERY and watch.view.state.phase == Phase.LIVE:
            shown = done - done % _LINE_EVERY
            at = time.time() - (watch.view.began or 0.0)
            console.print(_line(at, f"{shown} iterations are done"), highlight=False)
        if not going_on:
            return
        time.sleep(poll_s)


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: that of the view, not of the run."""
    parser = argparse.ArgumentParser(prog="python -m swift_ft.cli.live", description="Watch a run.")
    parser.add_argument("endpoint", help="host:port of the rendezvous store (swift-run --endpoint-out)")
    parser.add_argument("run_id", help="the name of the run (--rdzv-id)")
    parser.add_argument("--iterations", type=int, help="of the whole run: the full length of the bars")
    args = parser.parse_args(argv)
    try:
        watch = Watch(args.endpoint, args.run_id, View(args.iterations))
    except ValueError:
        parser.error(f"{args.endpoint!r} is no endpoint: write host:port.")
    except SwiftError as error:
        print(f"swift_ft.cli.live: {error}", file=sys.stderr)
        return EXIT_USAGE
    deadline = time.monotonic() + _FIRST_EVENT_S

    def running() -> bool:
        begun = watch.view.began is not None
        return not watch.over and (begun or time.monotonic() < deadline)

    try:
        show(watch, Console(), running)
    except KeyboardInterrupt:
        return 0
    if watch.view.began is None:
        print(f"swift_ft.cli.live: no run {args.run_id!r} at {args.endpoint}.", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
