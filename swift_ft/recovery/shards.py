"""Shards of samples for each pipeline: the same global order under every layout, each sample once. Pure.

Two ways. With a fixed global batch (Tenplex §5.2) iteration i takes the next samples of the epoch's order,
and its pipelines take consecutive microbatches of them, so a change of layout changes who takes a sample and
not when. With a queue of shards (DLRover §5.2) each worker asks for the next shard when it is ready, so slow
workers take fewer; what a lost worker had not finished is handed out again, before all later shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from immutables import Map

from swift_ft.errors import UsageError

__all__ = ["Epoch", "ShardQueue", "deal_microbatches"]


@dataclass(frozen=True)
class Epoch:
    """An epoch's samples, numbered in their global order, in global batches.

    Attributes:
        samples: in the epoch.
        batch: samples of an iteration, under every layout. The last iteration may have fewer.
        first: the number of the first sample that is not taken yet.
    """

    samples: int
    batch: int
    first: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or not 0 <= self.first <= self.samples:
            raise UsageError(
                f"{self.samples} samples in batches of {self.batch} cannot begin at {self.first}"
            )

    @property
    def iterations(self) -> int:
        """Iterations that the rest takes."""
        return -(-(self.samples - self.first) // self.batch)

    def after(self, iterations: int) -> Epoch:
        """The rest of the epoch after some iterations, for whatever layout comes next.

        Raises:
            UsageError: if the rest has fewer iterations.
        """
        if not 0 <= iterations <= self.iterations:
            raise UsageError(
                f"{iterations} iterations are not in the rest of the epoch: it has {self.iterations}"
            )
        return replace(self, first=min(self.first + iterations * self.batch, self.samples))

    def taken(self, iteration: int, microbatches: Sequence[int]) -> list[range]:
        """The samples of each pipeline in an iteration of the rest.

        Args:
            iteration: counted from 0 at ``first``.
            microbatches: of each pipeline. All microbatches have as many samples.

        Returns:
            One range per pipeline; together, in order, the iteration's samples. In the last iteration the
            last pipelines may have fewer samples, or none.

        Raises:
            UsageError: if the microbatches do not divide the batch, or the iteration is beyond the epoch.
        """
        if not 0 <= iteration < self.iterations:
            raise UsageError(
                f"iteration {iteration} is not in the rest of the epoch: it has {self.iterations}"
            )
        size = self._microbatch(microbatches)
        start = self.first + iteration * self.batch
        found = []
        for count in microbatches:
            end = start + count * size
            found.append(range(min(start, self.samples), min(end, self.samples)))
            start = end
        return found

    def partition(self, microbatches: Sequence[int]) -> list[list[range]]:
        """All that is left of the epoch: for each pipeline its samples, iteration by iteration."""
        rest = [self.taken(iteration, microbatches) for iteration in range(self.iterations)]
        return [[ranges[pipeline] for ranges in rest] for pipeline in range(len(microbatches))]

    def _microbatch(self, microbatches: Sequence[int]) -> int:
        """Samples of a microbatch."""
        total = sum(microbatches)
        if not microbatches or min(microbatches) < 0 or total < 1 or self.batch % total:
            raise UsageError(
                f"{list(microbatches)} microbatches do not divide a global batch of {self.batch} samples: "
                "their sum must be a divisor of it, so that the batch stays the same"
            )
        return self.batch // total


def deal_microbatches(microbatches: int, speeds: Sequence[int]) -> tuple[int, ...]:
    """So many microbatches in proportion to the speeds of pipelines, with the largest remainders rounded up.

    Raises:
        UsageError: if no pipeline has a speed.
    """
    total = sum(speeds)
    if not speeds or min(speeds) < 0 or total < 1 or microbatches < 0:
        raise UsageError(f"{microbatches} microbatches cannot be dealt to pipelines of speeds {list(speeds)}")
    shares = [microbatches * speed // total for speed in speeds]
    by_rest = sorted(range(len(speeds)), key=lambda i: (-(microbatches * speeds[i] % total), i))
    for i in by_rest[: microbatches - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


@dataclass(frozen=True)
class ShardQueue:
    """Shards of an epoch that workers take one by one: to do, being done, done (DLRover §5.2).

    It belongs to the checkpoint: :meth:`to_json` and :meth:`from_json`.

    Attributes:
        samples: in the epoch.
        size: samples of a shard; the last one may have fewer.
        doing: by shard the worker that has it.
        returned: shards that a lost worker had, and no other has yet.
        next: the first shard that no worker ever had. Done are all below it that are in neither.
    """

    samples: int
    size: int
    doing: Map[int, int] = field(default_factory=Map)
    returned: frozenset[int] = frozenset()
    next: int = 0

    def __post_init__(self) -> None:
        if self.samples < 0 or self.size < 1:
            raise UsageError(f"{self.samples} samples in shards of {self.size}: a shard has at least one")

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-self.samples // self.size)

    @property
    def is_done(self) -> bool:
        """Whether all shards are done."""
        return self.next == self.shards and not self.doing and not self.returned

    def ranges(self, shard: int) -> range:
        """The samples of a shard."""
        return range(shard * self.size, min((shard + 1) * self.size, self.samples))

    def take(self, worker: int) -> tuple[ShardQueue, int | None]:
        """The queue after a worker has taken the first shard to do; None if there is none."""
        if self.returned:
            shard = min(self.returned)
            left = replace(self, returned=self.returned - {shard})
        elif self.next < self.shards:
            shard = self.next
            left = replace(self, next=shard + 1)
        else:
            return self, None
        return replace(left, doing=left.doing.set(shard, worker)), shard

    def done(self, worker: int, shard: int) -> ShardQueue:
        """The queue after a worker has reported a shard. A late report changes nothing."""
        if self.doing.get(shard) != worker:
            return self
        return replace(self, doing=self.doing.delete(shard))

    def lost(self, worker: int) -> ShardQueue:
        """The queue after a worker is lost: what it had is to do again, before all later shards."""
        back = frozenset(shard for shard, holder in self.doing.items() if holder == worker)
        doing = Map({shard: holder for shard, holder in self.doing.items() if shard not in back})
        return replace(self, doing=doing, returned=self.returned | back)

    def to_json(self) -> dict[str, object]:
        """For a checkpoint. Shards that are being done then are to do after a restart."""
        open_shards = sorted(self.returned | set(self.doing))
        return {"samples": self.samples, "size": self.size, "next": self.next, "to_do_again": open_shards}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> ShardQueue:
        """The queue of a checkpoint.

        Raises:
            UsageError: if it is none.
        """
        numbers, again = [data.get(key) for key in ("samples", "size", "next")], data.get("to_do_again")
        known = isinstance(again, list) and all(_is_count(value) for value in (*numbers, *again))
        if not known or not isinstance(again, list):
            raise UsageError(
                f"{dict(data)} is no queue of shards: it needs samples, size, next and to_do_again"
            )
        samples, size, following = (int(str(value)) for value in numbers)
        queue = cls(samples, size, returned=frozenset(again), next=following)
        if following > queue.shards or any(shard >= following for shard in again):
            raise UsageError(f"{dict(data)} is no queue of shards: it names some that were never given out")
        return queue

    def __iter__(self) -> Iterator[int]:
        """The shards to do, in the order in which they are given out."""
        yield from sorted(self.returned)
        yield from range(self.next, self.shards)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
