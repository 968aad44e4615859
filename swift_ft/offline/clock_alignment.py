"""Bounds on the differences of hosts' clocks, from what their processes saw of the journal. Pure.

An entry cannot be seen before it was appended. So an entry that one host appended and another one saw bounds
the difference of their clocks from one side, and one that went the other way from the other side, as the
request and the answer of NTP do. All that both appended and saw count, and the tightest bounds hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swift_ft.observe.spans import Recording


@dataclass(frozen=True, slots=True)
class Clock:
    """The relation of one clock to the reference.

    Attributes:
        shift: nanoseconds to add to its times, for times of the reference.
        uncertainty: by how much that may be wrong at most, in nanoseconds: 0 for the reference itself. None
            if the entries bound it from one side only, or not at all; then it is the bound, or what the
            hosts' own Unix times say.
    """

    shift: int
    uncertainty: int | None


def align(recordings: Mapping[str, Sequence[Recording]], reference: str) -> dict[str, Clock]:
    """All clocks, in terms of one of them.

    Args:
        recordings: by the name of their clock.
        reference: one of these names.
    """
    notes = {clock: _Notes(of_clock) for clock, of_clock in recordings.items()}
    home = notes[reference]
    clocks = {reference: Clock(0, 0)}
    for name, own in notes.items():
        if name == reference:
            continue
        least = max(_differences(home, own), default=None)
        most = min((-difference for difference in _differences(own, home)), default=None)
        if least is not None and most is not None:
            clocks[name] = Clock((least + most) // 2, abs(most - least) // 2)
        elif (bound := least if least is not None else most) is not None:
            clocks[name] = Clock(bound, None)
        else:
            clocks[name] = Clock(own.to_unix - home.to_unix, None)
    return clocks


class _Notes:
    """The entries that processes of one clock appended and saw."""

    def __init__(self, recordings: Iterable[Recording]) -> None:
        recordings = list(recordings)
        self.to_unix = recordings[0].unix - recordings[0].began
        self.own = [note for recording in recordings for note in recording.own]
        self._seen = [sorted(recording.seen) for recording in recordings]

    def seen(self, position: int) -> int | None:
        """When the first of them saw an entry; None if none noted it."""
        times = (_seen_at(seen, position) for seen in self._seen)
        return min((at for at in times if at is not None), default=None)


def _seen_at(seen: Sequence[tuple[int, int, int]], position: int) -> int | None:
    index = bisect_right(seen, position, key=lambda note: note[0]) - 1
    if index < 0 or position > seen[index][1]:
        return None
    return seen[index][2]


def _differences(author: _Notes, reader: _Notes) -> Iterable[int]:
    """For each entry that one appended and the other saw: the author's time minus the reader's.

    What has to be added to the reader's times, for those of the author, is no less.
    """
    for position, appended in author.own:
        if (seen := reader.seen(position)) is not None:
            yield appended - seen
