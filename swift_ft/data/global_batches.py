"""Global batches that stay the same however many replicas share them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from torch.utils.data import Dataset, IterableDataset

from swift_ft.data.batch_source import BatchKey, BatchSource
from swift_ft.data.order import SampleOrder, shards_of
from swift_ft.data.sample_log import SampleLog
from swift_ft.data.shares import Change, deal, shares_at
from swift_ft.determinism import derive_seed
from swift_ft.errors import UsageError

_logger = logging.getLogger(__name__)

_AHEAD = 2
"""Shards that are fetched before they are needed."""


_WORDS = {
    "samples": "The data set's number of samples",
    "identity": "The data set's identity",
    "batch_size": "The global batch",
    "shards": "The digest of the sizes of the data set's shards",
    "shuffle": "shuffle=",
    "seed": "seed=",
}


class GlobalBatches:
    """A replica's part of each global batch, counted on over all epochs.

    All samples stand in one order, by seed and epoch. Each global batch is the next part of it, and is dealt
    to the replicas one after the other. So a run that goes on with more or fewer replicas gets the same
    global batches, and every sample of an epoch is trained on exactly once, in the same order. A global batch
    may end one epoch and begin the next.

    What the data set draws at random (augmentation by torch, Python or NumPy) depends on the seed and the
    sample's place in the order, and not on who loads it. A data set that loads several samples at once
    (``__getitems__``) draws by its first one. What the script sets in the data set counts from the next batch
    on, as in :class:`IndexedBatches`.

    Make it a part of ``Session(state)``: then the session deals its batches to the replicas, a run may be
    continued with more or fewer of them, and one with another data set, seed or batch is refused.

    Args:
        dataset: map-style: it has ``__getitem__`` and ``__len__``. torch's, or one of Hugging Face. If it has
            ``shard_sizes``, as :class:`FileSamples` does, these are the shards, and its ``prefetch`` is told
            which come next.
        batch_size: samples per iteration, of all replicas together.
        shuffle: another order in each epoch.
        seed: of the order, and of what the data set draws.
        shard_size: samples of consecutive indices that stay together in a shuffled order, for data that is
            read in large pieces. Without it, the order is that of ``DistributedSampler``.
        replicas: that share a batch. If left out, those of the session that it is a part of.
        replica: this worker's number among them.
        weights: of the replicas, for unlike devices: how many samples each can take, in proportion. All alike
            if left out.
        unit: samples that stay together when a batch is dealt, such as a microbatch.
        log: a folder in which each replica writes down the samples of every iteration.
        num_workers: processes that load batches; 0 to load them when they are asked for.
        options: further arguments of ``DataLoader``, such as ``collate_fn`` and ``pin_memory``.

    Attributes:
        dataset: as it was given.
        dealt: it has been said how many replicas share a batch.
        weighted: the script has asked for :attr:`weight`, so that shares may differ.
        logs: this worker writes samples down, if any does. Of several workers with the same part, one does.

    Raises:
        UsageError: for an iterable-style data set, a batch that cannot be dealt, or one that is larger than
            an epoch, as is a shard.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        shard_size: int | None = None,
        replicas: int | None = None,
        replica: int = 0,
        weights: Sequence[float] | None = None,
        unit: int = 1,
        log: str | Path | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        samples = _length_of(dataset)
        if not 0 < batch_size <= samples:
            raise UsageError(
                f"A global batch of {batch_size} samples does not fit into an epoch of {samples}: "
                "some would be in it twice. Give a smaller one."
            )
        shards = _shards(dataset, samples, shard_size)
        self._weights = weights
        self._unit = unit
        self.dealt = replicas is not None
        order = SampleOrder(shards, shuffle=shuffle, seed=seed)
        prefetch = getattr(dataset, "prefetch", None) if shard_size is None else None
        self._part = _Part(order, batch_size, seed, prefetch)
        self.dataset = dataset
        self._source = BatchSource(dataset, self._part.key, num_workers, options)
        self.weighted, self.logs = False, True
        self._last = 0  # the iteration whose batch was given last
        self._given = 0
        self._deal(len(weights or [1.0]) if replicas is None else replicas, replica)
        self._log = SampleLog(log) if log is not None else None
        self._state = {
            "samples": samples,
            "identity": identity_of(dataset),
            "batch_size": batch_size,
            "shards": xxhash.xxh3_64_hexdigest(repr(shards).encode()),
            "shuffle": shuffle,
            "seed": seed,
        }

    def deal(self, replicas: int, replica: int, weights: Sequence[float] | None = None) -> None:
        """Deal the batches to so many replicas, unless the script has said to how many. A session does it.

        Args:
            replicas: that share a batch.
            replica: this worker's number among them.
            weights: of the replicas, where a plan says them.

        Raises:
            UsageError: if a batch cannot be dealt to them.
        """
        if not self.dealt:
            if weights is not None:
                self._weights = weights
            self._deal(replicas, replica)
            self.dealt = True

    def _deal(self, replicas: int, replica: int) -> None:
        if self._weights is not None and len(self._weights) != replicas:
            raise UsageError(
                f"There are {len(self._weights)} weights for {replicas} replicas: give one for each."
            )
        self._part.shares = self.shares_for(self._weights or [1.0] * replicas)
        self._part.replica = replica
        self._source.close()  # its workers load another part

    def shares_for(self, weights: Sequence[float]) -> tuple[int, ...]:
        """The shares of replicas that can take so many samples each, in proportion.

        Raises:
            UsageError: if a batch cannot be dealt to so many.
        """
        return tuple(deal(self._part.batch_size, self._unit, weights))

    def follow(self, changes: Sequence[Change]) -> None:
        """Deal batches otherwise, each time from an iteration on. A session does it, for slow replicas.

        Args:
            changes: all that there were, the earliest first.
        """
        if self._part.changes != tuple(changes):
            self._part.changes = tuple(changes)
            self._source.close()

    @property
    def batch_size(self) -> int:
        """Samples per iteration, of all replicas together."""
        return self._part.batch_size

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each replica, as batches were dealt in the beginning."""
        return self._part.shares

    def shares_at(self, index: int) -> tuple[int, ...]:
        """Samples of each replica in an iteration."""
        return self._part.shares_at(index)

    @property
    def weight(self) -> float:
        """The factor for a replica's mean loss, where gradients are averaged over replicas.

        It makes the average that of all samples of the global batch, and is 1 where shares are equal. It is
        that of the batch that was given last.
        """
        self.weighted = True
        shares = self.shares_at(self._last)
        return shares[self._part.replica] * len(shares) / self._part.batch_size

    def samples(self, index: int) -> list[int]:
        """The indices of this replica's samples in an iteration's global batch."""
        return self._part.key(index).samples

    def __getitem__(self, index: int) -> Any:
        """The part of this replica in an iteration's global batch. Iterations count from 0.

        Raises:
            IndexError: for a negative iteration.
        """
        if not self.dealt and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                "How many replicas share a batch is not known: make these GlobalBatches a part of "
                "Session(state), or give replicas= and replica=."
            )
        self._warn_of_weight(index)
        batch = self._source[index]
        if self._log is not None and self.logs:
            self._log.write(index, self.samples(index), self.shares_at(index), self._part.replica)
        self._last = index
        return batch

    def _warn_of_weight(self, index: int) -> None:
        """Say it once, when a batch was trained on whose weight was not asked for, and had to be."""
        self._given += 1
        if self._given == 2 and not self.weighted and len(set(shares := self.shares_at(index))) > 1:
            _logger.warning(
                "Replicas get %s samples of each batch, and the script has not asked for the weight of its "
                "own part, so gradients may be those of another average: multiply the mean loss by "
                "GlobalBatches.weight",
                ", ".join(map(str, shares)),
                extra={"event": "weight_not_asked_for", "shares": list(shares)},
            )

    def close(self) -> None:
        """End the workers. The next batch starts them again."""
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """All that the order of the samples depends on, for ``Session(state)``. The same on all replicas."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with the run that is continued.

        Raises:
            UsageError: if that had another order.
        """
        check_same(state, self._state)


class _Part:
    """The samples of each global batch that belong to one replica.

    Attributes:
        shares: samples of each replica, in the beginning.
        changes: of the shares, the earliest first.
        replica: its number.
    """

    def __init__(
        self, order: SampleOrder, batch_size: int, seed: int, prefetch: Callable[[Sequence[int]], None] | None
    ) -> None:
        self._order = order
        self._prefetch = prefetch
        self._begun = -1  # the shard that was last begun
        self.batch_size = batch_size
        self._seed = seed
        self.shares: tuple[int, ...] = ()
        self.changes: tuple[Change, ...] = ()
        self.replica = 0

    def shares_at(self, index: int) -> tuple[int, ...]:
        """Samples of each replica in an iteration."""
        return shares_at(self.changes, index) or self.shares

    def key(self, index: int) -> BatchKey:
        """The samples of its part in an iteration, and the seed of each."""
        shares = self.shares_at(index)
        position = index * self.batch_size + sum(shares[: self.replica])
        count = shares[self.replica]
        if self._prefetch is not None:
            shards = self._order.shards_from(position, 1 + _AHEAD)
            if shards[0] != self._begun:
                self._begun = shards[0]
                self._prefetch(shards)
        seeds = [derive_seed(self._seed, place) for place in range(position, position + count)]
        return BatchKey(self._order.at(position, count), seeds)


def _length_of(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            "GlobalBatches takes a map-style data set. For an iterable one, make a DataLoader or a "
            "StatefulDataLoader, and use swift_ft.data.LoaderBatches(loader)."
        )
    return len(dataset)


def _shards(dataset: Any, samples: int, shard_size: int | None) -> list[int]:
    if shard_size is not None:
        return shards_of(samples, shard_size)
    return list(getattr(dataset, "shard_sizes", None) or [samples])


def identity_of(dataset: Any) -> str:
    """A data set's identity; empty if it tells none.

    Its ``identity`` is taken, as :class:`FileSamples` has one, or the ``_fingerprint`` of Hugging Face's data
    sets, which changes with the data and with each ``map`` and ``filter``.
    """
    return str(getattr(dataset, "identity", None) or getattr(dataset, "_fingerprint", ""))


def check_same(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare what the order of the samples depends on.

    Args:
        saved: by name, in the run that is continued.
        present: by name, now.

    Raises:
        UsageError: for the first that differs: iterations would be given other samples.
    """
    for name, now in present.items():
        before = saved.get(name, now)
        if before != now:
            raise UsageError(
                f"{_WORDS[name]} was {before!r} when this run began, and is {now!r} now: iterations would "
                "get other samples. Give the same again, or begin a new run with a store= of its own."
            )
