"""Gaps in a journal: what is still known of a run when entries are missing, and what is not. Pure.

The state of a job follows from all entries, so it is known up to the first gap. The entries after a gap tell
facts: which generation there was, which checkpoints were committed, how the job was closed. Parts of
checkpoints carry the number of returns to a checkpoint (their epoch), so they show whether all workers went
back to one within the gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import State, Verdict
from swift_ft.units import format_moment


@dataclass(frozen=True, slots=True)
class Gap:
    """Neighbouring entries that are missing.

    Attributes:
        first: position of the first one.
        last: position of the last one.
        began: when the entry before them was written, in Unix seconds; None if there is none.
        ended: when the entry after them was written.
    """

    first: int
    last: int
    began: float | None
    ended: float

    def __str__(self) -> str:
        what = f"the entries {self.first} to {self.last} of the journal are missing"
        if self.first == self.last:
            what = f"the entry {self.first} of the journal is missing"
        began = "from the beginning" if self.began is None else f"from {format_moment(self.began)}"
        return f"{what} ({began} to {format_moment(self.ended)})"


@dataclass(frozen=True, slots=True)
class Later:
    """The facts that the entries after the first gap tell.

    Attributes:
        generation: the newest one that they name; that before the gap if they name none.
        committed: the newest checkpoint whose commit they tell; None if they tell none.
        epoch: the newest one of a part of a checkpoint; None if they name none.
        epoch_shown_in: the newest generation in which such a part was saved. Another epoch may have begun in
            a later one.
        saved_in: the first generation in which a part was saved, by iteration of the checkpoint, of the
            newest epoch.
        verdict: how the job was closed; None if it was not, or only the missing entries tell.
    """

    generation: int
    committed: int | None
    epoch: int | None
    epoch_shown_in: int
    saved_in: dict[int, int]
    verdict: Verdict | None

    def log_since(self, before: State, begin: int) -> int | None:
        """The generation before which all segments of the log belong to an abandoned history.

        Args:
            before: the state before the gap.
            begin: the checkpoint that a replay begins from.

        Returns:
            None if the missing entries may tell of a return to a checkpoint, after which another history
            began: then nothing shows which segments count.
        """
        if self.epoch is None or self.epoch_shown_in < self.generation:
            return None
        if self.epoch == before.checkpoints.epoch:
            return before.checkpoints.log_since
        # No return followed, so all that was logged since that checkpoint was saved is of one history.
        return self.saved_in.get(begin)


def find_gaps(entries: Sequence[Entry]) -> Iterator[Gap]:
    """The gaps before the last entry."""
    expected, before = 0, None
    for entry in entries:
        if entry.position > expected:
            yield Gap(expected, entry.position - 1, before, entry.at)
        expected, before = entry.position + 1, entry.at


def what_followed(before: State, entries: Sequence[Entry]) -> Later:
    """The facts in entries whose predecessors are missing.

    Args:
        before: the state before the gap.
        entries: all that are known after it.
    """
    generations = [before.generation]
    committed, verdict = None, None
    parts: list[ev.PartPersisted] = []
    for entry in entries:
        event = entry.event
        generations.append(getattr(event, "generation", 0))
        match event:
            case ev.PartPersisted():
                parts.append(event)
            case ev.CheckpointCommitted():
                committed = event.iteration
            case ev.JobClosed():
                verdict = Verdict(False, event.reason, event.exit_code)
    epoch = max((part.epoch for part in parts), default=None)
    newest = [part for part in parts if part.epoch == epoch]
    saved_in: dict[int, int] = {}
    for part in newest:
        saved_in[part.iteration] = min(part.generation, saved_in.get(part.iteration, part.generation))
    shown_in = max((part.generation for part in newest), default=0)
    return Later(max(generations), committed, epoch, shown_in, saved_in, verdict)
