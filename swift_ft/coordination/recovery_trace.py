"""The time in which this process records its spans (`observe/spans.py`): from a loss until all is well again.

A recording begins with the first sign of a loss, whichever comes first: a connection that ends, a process
that is gone, or the event in the journal. A worker's ends with its first completed iteration, an agent's as
soon as all are live. Positions of the journal that several processes have seen or written are noted on the
way: they tie the clocks of hosts together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swift_ft.observe.spans import Recorder, Recording, recorder
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.recoveries import INTERRUPTIONS, interrupts

_INTERRUPTIONS = frozenset(INTERRUPTIONS)


class RecoveryTrace:
    """Begins and ends the recordings of one process.

    Args:
        by: the name under which the process appends events.
        write: takes a recording, and the generation that went live. Returns at once.
        until_live: the recording ends when all are live; else the training thread ends it (:meth:`end`).
        own: the process's recorder.
    """

    def __init__(
        self,
        by: str,
        write: Callable[[Recording, int], None],
        *,
        until_live: bool,
        own: Recorder = recorder,
    ) -> None:
        self._by = by
        self._write = write
        self._until_live = until_live
        self._recorder = own
        # Owner: the journal thread, once it runs.
        self._started = False
        self._losing: tuple[Sequence[Entry], tuple[int, int]] | None = None  # a block with a loss, and when
        self._recovers = own.active  # a replacement is started in a recovery
        self._lost_in = 0  # the generation that the newest loss ended

    def start(self) -> None:
        """The journal thread is about to start. What was read until now is history."""
        self._started = True

    def on_entries(self, entries: Sequence[Entry]) -> None:
        """Note those of a block. Called in the journal thread, before the state shows them."""
        if self._started and not _INTERRUPTIONS.isdisjoint({type(entry.event) for entry in entries}):
            self._losing = entries, self._recorder.both_clocks()
        elif self._recorder.active:
            self._note(entries, self._recorder.both_clocks())

    def on_change(self, before: State, after: State) -> None:
        """Begin or end a recording. Called in the journal thread, before all others learn of the change."""
        losing, self._losing = self._losing, None
        if losing is not None and interrupts(before, after):
            if before.phase == Phase.LIVE:
                self.end(before.generation)  # its first iteration did not complete
            self._lost_in = before.generation
            self._recorder.begin(losing[1][0])
            self._recovers = True
        elif losing is not None and not self._recovers and after.phase == Phase.LIVE:
            self._recorder.drop()  # a spare was lost, or a machine that others had reported before
        if not self._recorder.active:
            return
        if losing is not None:
            self._note(*losing)
        if after.phase == Phase.ENDED:
            self._recorder.drop()
        elif after.phase == Phase.LIVE and self._until_live:
            self.end(after.generation)

    def joined(self, state: State, since: int) -> None:
        """The job was in this state when this process was started: if it recovers, record from there on.

        Args:
            since: when the process began, by the recorder's clock.
        """
        lost = state.generation > 0 and state.phase == Phase.FORMING
        again = state.generation > 1 and state.phase in (Phase.AGREEING, Phase.RECOVERING)
        if lost or again:
            self._recovers = True
            self._recorder.begin(since)

    def end(self, generation: int) -> None:
        """All that was recorded belongs to the recovery after which this generation went live.

        From any thread; a recording is given away once. A worker may complete the iteration that it is in
        when the journal has a loss already: that is the end of no recovery.
        """
        if not self._recovers or generation <= self._lost_in:
            return
        recording = self._recorder.take()
        if recording is not None:
            self._recovers = False
            self._write(recording, generation)

    def _note(self, entries: Sequence[Entry], clocks: tuple[int, int]) -> None:
        now, unix = clocks
        self._recorder.saw(entries[0].position, entries[-1].position, now)
        for entry in entries:
            if entry.by == self._by:  # so the entry's time is of this host
                self._recorder.appended(entry.position, now - (unix - round(entry.at * 1e9)))
