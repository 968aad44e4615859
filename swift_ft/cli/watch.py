"""Watches a run without taking part in it: its journal and the workers' progress, as a :class:`View`.

:class:`View` is pure. :class:`Watch` reads the rendezvous store and updates it. ``live.py`` draws it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed import DistError

from swift_ft.cli.journal_news import news_of
from swift_ft.cli.news import News, Weight
from swift_ft.cli.words import machine_in_words
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.journal_reader import Excerpt, JournalReader
from swift_ft.coordination.progress import ProgressReader
from swift_ft.coordination.runs import newest_run
from swift_ft.coordination.store_client import connect
from swift_ft.errors import SwiftError
from swift_ft.recovery.devices import pace_of
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan
from swift_ft.units import in_spans, spans_of

_EVENTS_SHOWN = 9
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker's last progress report.

    Attributes:
        iteration: completed iterations of its state.
        mode: ``live``, ``replay``, ``waiting``, ``loading`` or ``finished``.
        at: Unix time of the report; of reading it if the report has no time.
        bytes_logged: bytes of payload that it has logged; None if the report does not say.
    """

    iteration: int
    mode: str
    at: float
    bytes_logged: int | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any], seen_at: float) -> Progress:
        """A worker's report."""
        return cls(facts["iteration"], facts["mode"], facts.get("at", seen_at), facts.get("bytes_logged"))


@dataclass(frozen=True, slots=True)
class Row:
    """One machine: its slot, its completed iterations, and its condition in words."""

    slot: int
    iteration: int
    words: str


class View:
    """The state of a run. Pure: it follows from the journal's entries and the workers' progress.

    Args:
        iterations: number of iterations of the whole run, if known.

    Attributes:
        progress: by rank.
        recent: the last events in words.
    """

    def __init__(self, iterations: int | None = None) -> None:
        self.iterations = iterations
        self.progress: dict[int, Progress] = {}
        self.recent: deque[News] = deque(maxlen=_EVENTS_SHOWN)
        self._history = History()

    @property
    def state(self) -> State:
        """The protocol's state."""
        return self._history.state

    @property
    def started_at(self) -> float | None:
        """Unix time of the first entry; None before it."""
        return self._history.started_at

    def begin(self, state: State) -> None:
        """Go on from a state. What led to it is not shown."""
        self._history.begin(state)

    def apply(self, entry: Entry) -> list[News]:
        """Applies the next entry of the journal; returns the sentences for it."""
        told = news_of(self._history.apply(entry), self._history)
        new = [one for one in told if one.weight > Weight.SILENT]
        self.recent.extend(new)
        return new

    @property
    def total(self) -> int | None:
        """Iterations of the whole run: as given, or as the workers' scripts ask for; None if unknown."""
        return self.iterations or self._history.steps

    def rows(self) -> list[Row]:
        """One row per machine, by slot."""
        return [self._row(slot) for slot in range(self.state.shape.machines)]

    def _row(self, slot: int) -> Row:
        reports = [p for rank in self.state.ranks_of(slot) if (p := self.progress.get(rank)) is not None]
        slowest = min(reports, key=lambda p: p.iteration, default=Progress(0, "", 0.0))
        return Row(slot, slowest.iteration, self._condition(slot, slowest))

    def _condition(self, slot: int, slowest: Progress) -> str:
        """From the protocol's state first: a worker's report may be that of its dead predecessor."""
        state = self.state
        ranks = set(state.ranks_of(slot))
        newcomer = state.generation > 1 and state.membership.started_in[slot] == state.generation
        if slot not in state.membership.members:
            return "dead, a replacement is awaited" if state.generation else "not here yet"
        match state.phase:
            case Phase.FORMING:
                return "waiting"
            case Phase.AGREEING if all(rank in state.round.statuses for rank in ranks):
                return "replacement, joined" if newcomer else "waiting"
            case Phase.AGREEING:
                return "replacement, starts" if newcomer else "starts" if state.generation == 1 else "leaves"
            case Phase.RECOVERING if state.plan is not None and (busy := ranks - set(state.round.ready)):
                return _task_in_words(state.plan, min(busy), slowest)
            case Phase.RECOVERING:
                return "waiting"
            case Phase.LIVE:
                words = "finished" if ranks <= set(state.round.finished) else "live"
                if layers := layers_on(state, slot):
                    words += f", layers {in_spans(spans_of(layers), '-')}"
                if share := shares_on(state, slot):
                    words += f", {share} of {sum(state.layouts.shares[-1].samples)} samples"
                if (pace := max(pace_of(state, rank) for rank in ranks)) > 1000:
                    words += f", takes {pace / 1000:.1f} times as long as others"
                host = state.membership.hosts.get(state.membership.members[slot])
                return words if host is None else f"{words}, on {machine_in_words(state, host)}"
        return "finished" if state.verdict is not None and state.verdict.ok else "stopped"


def layers_on(state: State, slot: int) -> tuple[int, ...]:
    """The layers of a LayerStack on a slot's workers, ascending; none where the model is not a stack."""
    placed = state.layouts.placed
    return tuple(sorted(layer for rank in state.ranks_of(slot) for layer in placed.get(rank, ())))


def shares_on(state: State, slot: int) -> int:
    """Samples of a global batch that a slot's workers, or their pipelines, have; 0 if that never changed."""
    if not state.layouts.shares:
        return 0
    samples = state.layouts.shares[-1].samples
    workers = state.world_size // len(samples)
    return sum(samples[replica] for replica in {rank // workers for rank in state.ranks_of(slot)})


def _task_in_words(plan: Plan, rank: int, progress: Progress) -> str:
    task = plan.tasks[rank]
    shared = plan.parallel_replay_of(rank)
    if shared is not None and rank in shared.helpers:
        return f"helps {' and '.join(f'worker {owner}' for owner in shared.owners)}"
    if progress.mode == "replay":
        return f"replays {progress.iteration - task.begin + 1} of {task.replay_until - task.begin}"
    return "starts" if task.load is None else f"loads the checkpoint of iteration {task.load}"


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one look at a run.

    Attributes:
        journal: its new entries, and the state before them if the view does not know it.
        progress: reports that have changed, by rank.
        lost: the rendezvous store is gone.
    """

    journal: Excerpt
    progress: dict[int, Progress]
    lost: bool = False


class Watch:
    """Reads the journal and the progress of a run.

    :meth:`look` may block in the rendezvous store, so a thread of its own may call it. All else belongs to
    the thread that draws.

    Args:
        address: where the rendezvous store is.
        run_id: the run, or the name of its runs: then the newest one.
        view: the view that :meth:`apply` updates.
        on_progress: called when a worker's progress has changed.

    Attributes:
        run_id: the run, with its number.
        lost: the rendezvous store is gone.

    Raises:
        RendezvousLostError: if nothing answers there.
    """

    def __init__(
        self,
        address: StoreAddress,
        run_id: str,
        view: View,
        on_progress: Callable[[int, Progress], None] | None = None,
    ) -> None:
        open_client = partial(connect, address, timeout_s=_CONNECT_S)
        self.run_id = newest_run(open_client, run_id)
        client = partial(open_client, self.run_id)
        self.view = view
        self.lost = False
        self._on_progress = on_progress
        # Owner of these five, once the view follows the run: the thread that looks.
        self._progress = ProgressReader(client())
        self._journal = open_journal(client, by="view")
        self._seen = Excerpt()
        self._reader = JournalReader(self._journal, lambda snapshot: self._seen.on_snapshot(snapshot))
        self._facts: dict[int, Any] = {}

    @property
    def exists(self) -> bool:
        """Whether the run has a journal. It may have ended.

        Raises:
            RendezvousLostError: if the store does not answer.
        """
        return not self._journal.is_empty()

    @property
    def over(self) -> bool:
        """Whether the run has ended, or its store is lost."""
        return self.lost or self.view.state.phase == Phase.ENDED

    def poll(self, wait_s: float = 0.0) -> list[News]:
        """Look and apply; returns the sentences for what is new. ``wait_s``: as of :meth:`look`."""
        return [] if self.over else self.apply(self.look(wait_s))

    def look(self, wait_s: float = 0.0) -> Seen:
        """Read new entries and progress. Changes nothing in the view.

        Args:
            wait_s: for so long it waits for an entry, if there is none.
        """
        self._seen = seen = Excerpt()
        try:
            new = self._reader.next(wait_s)
            while new is not None:
                seen.entries += new
                new = self._reader.next(0.0)
            return Seen(seen, self._changed_progress())
        except (SwiftError, DistError, RuntimeError):
            return Seen(seen, {}, lost=True)  # the store ends with the run

    def apply(self, seen: Seen) -> list[News]:
        """Update the view; returns the sentences for what is new."""
        if seen.journal.began is not None:
            self.view.begin(seen.journal.began)
        news = [sentence for entry in seen.journal.entries for sentence in self.view.apply(entry)]
        for rank, progress in seen.progress.items():
            self.view.progress[rank] = progress
            if self._on_progress is not None:
                self._on_progress(rank, progress)
        self.lost = self.lost or seen.lost
        return news

    def _changed_progress(self) -> dict[int, Progress]:
        now, found = time.time(), self._progress.read(self.view.state.shape.machines)
        changed = {rank: facts for rank, facts in found.items() if facts != self._facts.get(rank)}
        self._facts |= changed
        return {rank: Progress.of(facts, now) for rank, facts in changed.items()}
