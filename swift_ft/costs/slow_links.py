"""Detection of links that are persistently slower than others and hold their worker up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_high

_BUSY = 0.1
"""The least share of a worker's time that a link must take, for it to matter."""
_FACTOR = 3.0
"""The least ratio of other links' median speed to a slow one's. Below half of it a link is slow no more."""
_JUDGEMENTS = 4
"""In a row that have to agree, each of another sample."""


@dataclass(frozen=True, slots=True)
class LinkSample:
    """A worker's note about its busiest link.

    Attributes:
        number: of the sample; each new one has another number.
        peer: the address of the host at the other end.
        busy: share of its time in which bytes were on their way.
        bytes_per_s: so many arrived, of that time.
    """

    number: int
    peer: str
    busy: float
    bytes_per_s: float


class SlowLinks:
    """Judges again and again, and says what has changed.

    Attributes:
        slow: the links that are slow: the address of the other end, by rank of the sender.
    """

    def __init__(self) -> None:
        self.slow: dict[int, str] = {}
        self._seen: dict[int, int] = {}
        self._agreed: dict[int, tuple[str, int]] = {}  # by rank: what would change, and how often it was so

    def judge(self, samples: Mapping[int, LinkSample]) -> dict[int, bool]:
        """Whether the link of a worker has become slow, or is so no more, by rank.

        Args:
            samples: the newest of each worker that has sent enough to say something.
        """
        changed = {}
        for rank, sample in samples.items():
            others = [one.bytes_per_s for other, one in samples.items() if other != rank]
            if not others or self._seen.get(rank) == sample.number:
                continue
            self._seen[rank] = sample.number
            slower = median_high(others) / sample.bytes_per_s
            if rank not in self.slow:
                differs, peer = sample.busy >= _BUSY and slower >= _FACTOR, sample.peer
            else:
                differs, peer = sample.peer == self.slow[rank] and slower < _FACTOR / 2, self.slow[rank]
            before, times = self._agreed.get(rank, (peer, 0))
            times = (times if before == peer else 0) + 1 if differs else 0
            self._agreed[rank] = peer, times
            if times >= _JUDGEMENTS:
                self._agreed[rank] = peer, 0
                changed[rank] = rank not in self.slow
                if changed[rank]:
                    self.slow[rank] = peer
                else:
                    del self.slow[rank]
        return changed
