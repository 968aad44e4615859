"""The order of all samples of a data set: by seed and epoch, for any number of workers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from swift_ft.determinism import derive_seed
from swift_ft.errors import UsageError


class SampleOrder:
    """Every sample once in each epoch, and the epochs one after the other.

    Samples lie in shards: files, or ranges of indices. Shuffled, the shards of an epoch follow in another
    order, and so do the samples inside of each. One shard makes the order of ``DistributedSampler``. With
    several, what is held in memory is the order of the shards and of the samples of two of them.

    Args:
        shard_sizes: samples of each shard. The first one's indices begin at 0, the others' follow.
        shuffle: False to leave samples in the order of their indices.
        seed: decides the order.
    """

    def __init__(self, shard_sizes: Sequence[int], *, shuffle: bool, seed: int) -> None:
        self._starts = [0, *accumulate(shard_sizes)]
        self._shuffle = shuffle
        self._seed = seed
        self._shards: dict[int, tuple[list[int], list[int]]] = {}  # of the last two epochs
        self._inside: dict[tuple[int, int], list[int]] = {}  # of the last two shards

    @property
    def samples(self) -> int:
        """Of one epoch."""
        return self._starts[-1]

    def at(self, position: int, count: int) -> list[int]:
        """The indices of samples.

        Args:
            position: of the first one, counted on over all epochs.
            count: how many.
        """
        found: list[int] = []
        while len(found) < count:
            found += self._run(position + len(found), count - len(found))
        return found

    def shards_from(self, position: int, count: int) -> list[int]:
        """The shards that come next, without repetition.

        Args:
            position: of a sample, counted on over all epochs. Its shard is the first.
            count: how many, at most.
        """
        found: list[int] = []
        for _ in range(count):
            epoch, place = divmod(position, self.samples)
            shards, starts = self._shards_of(epoch)
            number = bisect_right(starts, place) - 1
            if shards[number] not in found:
                found.append(shards[number])
            end = starts[number + 1] if number + 1 < len(starts) else self.samples
            position = epoch * self.samples + end
        return found

    def _run(self, position: int, count: int) -> Sequence[int]:
        """As many of these samples as lie in the shard of the first."""
        epoch, place = divmod(position, self.samples)
        shards, starts = self._shards_of(epoch)
        number = bisect_right(starts, place) - 1
        offset = place - starts[number]
        return self._samples_of(epoch, shards[number])[offset : offset + count]

    def _shards_of(self, epoch: int) -> tuple[list[int], list[int]]:
        """The shards of an epoch in their order, and the place of each one's first sample."""
        if epoch not in self._shards:
            sizes = [end - start for start, end in zip(self._starts, self._starts[1:], strict=False)]
            shards = list(range(len(sizes)))
            if self._shuffle and len(sizes) > 1:
                shards = _permutation(len(sizes), derive_seed(self._seed, epoch))
            starts = [0, *accumulate(sizes[shard] for shard in shards[:-1])]
            self._shards = {**dict(list(self._shards.items())[-1:]), epoch: (shards, starts)}
        return self._shards[epoch]

    def _samples_of(self, epoch: int, shard: int) -> Sequence[int]:
        start, end = self._starts[shard], self._starts[shard + 1]
        if not self._shuffle:
            return range(start, end)
        if (epoch, shard) not in self._inside:
            alone = len(self._starts) == 2
            seed = self._seed + epoch if alone else derive_seed(self._seed, epoch, shard)
            inside = [start + number for number in _permutation(end - start, seed)]
            self._inside = {**dict(list(self._inside.items())[-1:]), (epoch, shard): inside}
        return self._inside[epoch, shard]


def shards_of(samples: int, shard_size: int | None) -> list[int]:
    """The sizes of the shards of a data set; the last one may be smaller.

    Raises:
        UsageError: for a shard that is empty, or larger than an epoch.
    """
    if shard_size is None:
        return [samples]
    if not 0 < shard_size <= samples:
        raise UsageError(
            f"A shard of {shard_size} samples does not fit into an epoch of {samples}: "
            f"give shard_size= between 1 and {samples}, or leave it out."
        )
    full, rest = divmod(samples, shard_size)
    return [shard_size] * full + [rest] * (rest > 0)


def _permutation(count: int, seed: int) -> list[int]:
    generator = torch.Generator()
    generator.manual_seed(seed)
    permutation: list[int] = torch.randperm(count, generator=generator).tolist()
    return permutation
