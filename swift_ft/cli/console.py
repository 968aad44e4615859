"""The console of a launcher: who is lost, what is done about it, what that cost, and what the run waits for.

It also writes the stream of events (``event_stream.py``).

A process of its own follows the journal with clients of its own and writes to stderr, so that a launcher that
forks its machines stays single-threaded, and one that hangs does not silence the console.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TextIO

from rich.console import Console

from swift_ft.cli.event_hook import HOOK_S, EventHook
from swift_ft.cli.event_stream import EventFile, EventStream
from swift_ft.cli.journal_news import news_of
from swift_ft.cli.news import News, Weight
from swift_ft.cli.words import summary
from swift_ft.config.option import flag_of
from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.incarnations import has_begun
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.store_client import connect
from swift_ft.errors import SwiftError
from swift_ft.launch.log_handlers import EventPipe
from swift_ft.launch.signals import leave_to_the_launcher
from swift_ft.observe.waits import Announcements, wait_in_words
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.pauses import Returns
from swift_ft.recovery.snapshot import JournalSnapshot
from swift_ft.recovery.waits import Limit, Wait, waiting_for

_logger = logging.getLogger(__name__)

_TICK_S = 1.0
_LAST_NEWS_S = 2.0
"""The time for which the end waits for the last entries of the journal."""
_LAST_TICK_S = 0.05
_CLOSE_S = 10.0
_CLAIM_S = 5.0


class LauncherConsole:
    """A forked child that narrates one run. Make it while the process has a single thread, before all else.

    Args:
        config: the run's; its limits are named in waits, and ``quiet`` silences the console.
    """

    def __init__(self, config: RunConfig) -> None:
        self._pid = 0
        streams = bool(config.events_log or config.on_event)
        if config.quiet and not streams:
            return
        self._close_s = _CLOSE_S + (HOOK_S if config.on_event else 0.0)
        launcher = os.getpid()
        orders_r, self._orders = os.pipe()
        pipe = self._pipe = EventPipe() if streams else None
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._orders)
            if pipe is not None:
                pipe.read_from_here()
            _serve(orders_r, config, launcher, pipe)
        os.close(orders_r)
        if pipe is not None:
            pipe.write_from_here()

    def expect(self, store: StoreAddress) -> None:
        """Begin to say how long the rendezvous store is waited for."""
        self._order({"store": str(store)})

    def follow(self, store: StoreAddress, run_id: str) -> None:
        """Begin to narrate a run."""
        self._order({"store": str(store), "run_id": run_id})

    def fail(self, reason: str) -> None:
        """Note that the launcher ends although the run may go on."""
        self._order({"failed": reason, "at": time.time()})

    def close(self) -> None:
        """Tell the rest with a summary, and end. Call it while the rendezvous store still runs."""
        if not self._pid:
            return
        if self._pipe is not None:
            self._pipe.mark()  # comes after the log events
        self._order({})
        os.close(self._orders)
        deadline = time.monotonic() + self._close_s
        with contextlib.suppress(ChildProcessError):  # reaped by who waits for any child
            while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                time.sleep(0.01)
        self._pid = 0

    def _order(self, order: dict[str, str | float]) -> None:
        if self._pid:
            with contextlib.suppress(BrokenPipeError):  # a console that was killed is no reason to stop a run
                os.write(self._orders, json.dumps(order).encode() + b"\n")


class WaitTeller:
    """Says what a run waits for: after 10 s, and then ever less often.

    Args:
        config: the run's, with the limits.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._step: object = None
        self._announcements = Announcements(0.0)
        self._returns = Returns()

    def tell(self, wait: Wait | None, now: float, state: State | None = None) -> str:
        """The announcement that is due now; empty if none is.

        Args:
            wait: what the run waits for now, if anything.
            now: a monotonic time.
            state: the job's, if it has one, at each call.
        """
        back_at = -math.inf if state is None else self._returns.last_at(state, now)
        step = wait.step if wait is not None else None
        if step != self._step:
            self._step, self._announcements = step, Announcements(now)
        if wait is None or not self._announcements.due(now):
            return ""
        limit_s = getattr(self._config, wait.limit) if wait.limit is not None else None
        flag = flag_of(wait.limit) if wait.limit is not None else ""
        since, what, paused_s = self._announcements.since, wait.what, 0.0
        if wait.limit == Limit.JOIN and back_at > since:
            paused_s = back_at - since
            if back_at > now:
                what += f" ({', '.join(self._returns.machines(now))}: away for {back_at - now:.0f} s more)"
        return wait_in_words(
            what, now - since, limit_s, flag=flag, until_progress=wait.until_progress, paused_s=paused_s
        )


class _QuietAtLast(Console):
    """A console whose reader may go, as in ``swift-run ... 2>&1 | head``."""

    def on_broken_pipe(self) -> None:
        """Show nothing more. By default this would end the process, and with it the stream of events."""
        self.quiet = True


class _Story:
    """The lines that are printed. Owner: the child's main thread."""

    def __init__(self, place: dict[str, Any], config: RunConfig, history: History) -> None:
        self._quiet = config.quiet
        self._history = history
        self._teller = WaitTeller(config)
        self._console = _QuietAtLast(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._began = time.time()
        self._store = Wait(
            (0, Phase.FORMING, "store"),
            f"the rendezvous store at {place['store']}",
            Limit.JOIN,
        )

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self._history.state.phase == Phase.ENDED

    def tell(self, found: Iterable[News]) -> None:
        """Print what happens in no undisturbed run."""
        for one in found:
            if one.weight > Weight.ROUTINE:
                self._print(one)

    def tell_wait(self) -> None:
        """Say what the run waits for, if that is due."""
        state = self._history.state
        wait = waiting_for(state) if state.shape.machines > 0 else self._store
        if text := self._teller.tell(wait, time.monotonic(), state):
            self._print(News(self._now(), text))

    def warn(self, text: str) -> None:
        """Print a warning about the launcher itself, even if it is quiet."""
        self._show(f"swift-run: {text}")

    def sum_up(self) -> None:
        """Print all recoveries in one line, if there were any and the run has ended."""
        if self.over and (text := summary(self._history)):
            self._print(News(self._now(), text))

    def _now(self) -> float:
        return time.time() - (self._history.started_at or self._began)

    def _print(self, one: News) -> None:
        if self._quiet:
            return
        style = "bold" if one.weight == Weight.GRAVE else None
        self._show(f"[swift-run {one.at:.1f} s] {one.text}", style)

    def _show(self, line: str, style: str | None = None) -> None:
        try:
            self._console.print(line, style=style)
        except OSError:  # a terminal that was closed
            self._console.quiet = True


def _serve(orders_r: int, config: RunConfig, launcher: int, pipe: EventPipe | None) -> NoReturn:
    for number in leave_to_the_launcher():
        signal.signal(number, lambda *_: None)  # the launcher decides when the story ends
    try:
        orders = os.fdopen(orders_r)
        if place := json.loads(orders.readline() or "{}"):
            _Narration(orders, place, config, pipe).run(launcher)
    except Exception:
        text = "the console of this launcher has failed; the run goes on without it, and without its events"
        _logger.exception(text, extra={"event": "console_failed"})
    finally:
        os._exit(0)  # threads may block in the rendezvous store


@dataclass(frozen=True, slots=True)
class _Read:
    """An entry of the journal. ``is_news``: it did not happen before this launcher started."""

    entry: Entry
    is_news: bool


@dataclass(frozen=True, slots=True)
class _Begin:
    """A snapshot of the journal: the state that its next entry follows."""

    state: State


class _Inbox:
    """All that threads of the child hear, in one queue: entries, orders of the launcher, and log events.

    Args:
        config: the run's.
        place: the first order.
        pipe: brings log events, if they are wanted.
    """

    def __init__(
        self, config: RunConfig, orders: TextIO, place: dict[str, Any], pipe: EventPipe | None
    ) -> None:
        self._config = config
        self._began = time.time()
        self._queue: queue.SimpleQueue[_Read | _Begin | _Order | _Record] = queue.SimpleQueue()
        self.get, self.get_nowait, self.empty = self._queue.get, self._queue.get_nowait, self._queue.empty
        self._obey(place)
        self._start(self._listen, orders)
        if pipe is not None:
            self._start(self._hear, pipe)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        name = f"swift-console{target.__name__}"
        threading.Thread(target=target, args=args, name=name, daemon=True).start()

    def _listen(self, orders: TextIO) -> None:
        while order := json.loads(orders.readline() or "{}"):
            self._obey(order)
        self._queue.put(_Order({}))

    def _obey(self, order: dict[str, Any]) -> None:
        self._queue.put(_Order(order))
        if "run_id" in order:
            self._start(self._follow, order)

    def _follow(self, place: dict[str, Any]) -> None:
        store = StoreAddress.parse(place["store"])
        client = partial(
            connect, store, place["run_id"], timeout_s=self._config.join_timeout_s, admit=has_begun
        )
        here_before = True

        def on_entries(entries: Sequence[Entry]) -> None:
            for entry in entries:
                old = here_before and entry.at < self._began - _TICK_S
                self._queue.put(_Read(entry, is_news=not old))

        def on_snapshot(snapshot: JournalSnapshot) -> None:
            self._queue.put(_Begin(snapshot.state))

        with contextlib.suppress(SwiftError):  # the launcher has its own clients, and reports it
            follower = Follower(
                open_journal(client, by="console"), on_entries=on_entries, on_snapshot=on_snapshot
            )
            here_before = False
            follower.start()

    def note_failed_hook(self, reason: str) -> None:
        """Called in the hook's thread."""
        self._queue.put(_Order({"hook": reason, "at": time.time()}))

    def _hear(self, pipe: EventPipe) -> None:
        while (record := pipe.receive()) is not None:
            self._queue.put(_Record(record))
        self._queue.put(_Record({}))


@dataclass(frozen=True, slots=True)
class _Order:
    """An order of the launcher; empty: it closes its console."""

    order: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Record:
    """A log event; empty: those sent before the launcher closed its console have all been heard."""

    record: dict[str, Any]


class _Narration:
    """Takes what the inbox brings, one after the other. Owner: the child's main thread."""

    def __init__(
        self, orders: TextIO, place: dict[str, Any], config: RunConfig, pipe: EventPipe | None
    ) -> None:
        self._history = History()
        self._story = _Story(place, config, self._history)
        self._inbox = _Inbox(config, orders, place, pipe)
        self._hook = EventHook(config.on_event, self._inbox.note_failed_hook) if config.on_event else None
        file = EventFile(config.events_log) if config.events_log else None
        self._stream = EventStream(self._history, *(out for out in (file, self._hook) if out is not None))
        self._heard = pipe is None  # all log events that were sent before the launcher closed its console
        self._closes_at: float | None = None

    def run(self, launcher: int) -> None:
        """Tell all, until the launcher closes its console or is gone."""
        while os.getppid() == launcher and not self._is_over():
            try:
                found = self._inbox.get(timeout=_TICK_S if self._closes_at is None else _LAST_TICK_S)
            except queue.Empty:
                self._story.tell_wait()
            else:
                self._take(found)
        self._take_rest()
        self._story.sum_up()
        if self._hook is not None:
            self._hook.close()
            self._take_rest()  # its last runs may be the first that fail

    def _is_over(self) -> bool:
        if self._closes_at is None:
            return False
        return time.monotonic() >= self._closes_at or (self._story.over and self._heard)

    def _take_rest(self) -> None:
        while not self._inbox.empty():
            self._take(self._inbox.get_nowait())

    def _take(self, found: _Read | _Begin | _Order | _Record) -> None:
        match found:
            case _Read(entry, is_news):
                change = self._history.apply(entry)
                told = news_of(change, self._history) if is_news else []
                self._story.tell(told)
                self._stream.add_news(told, entry)
            case _Begin(state):
                self._history.begin(state)
            case _Record(record) if not record:
                self._heard = True
            case _Record(record):
                self._stream.add_record(record)
            case _Order({"run_id": run_id, "store": store}):
                self._stream.run_id = run_id
                if self._hook is not None:
                    address = StoreAddress.parse(store)
                    self._hook.agree_in(partial(connect, address, run_id, timeout_s=_CLAIM_S))
            case _Order({"hook": reason, "at": at}):
                self._story.warn(reason)
                self._stream.add("hook_failed", at=at, reason=reason)
            case _Order({"failed": reason, "at": at}):
                self._stream.add("launcher_failed", at=at, reason=reason)
            case _Order(order) if not order:
                self._closes_at = time.monotonic() + _LAST_NEWS_S
