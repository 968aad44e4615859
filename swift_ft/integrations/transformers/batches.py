"""The batches of a Trainer's own data loader, found by epoch and place, so that any of them can be had again.

The order is the loader's: its batch sampler says which samples make a batch, as under torchrun. The loader
itself is not iterated over: it reads one batch ahead, and what its workers have drawn at random by then
depends on all that they have read before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, IterableDataset

from swift_ft.data import LoaderBatches
from swift_ft.data.batch_source import BatchKey, BatchSource, random_numbers_of
from swift_ft.determinism import derive_seed

_COPIED = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
"""Options of a ``DataLoader`` that do not say which samples make a batch."""


class TrainBatches:
    """The batches of one worker, by epoch and by their place in it.

    What the data set draws at random depends on the seed, the batch and the rank only. Processes that load
    batches begin with an epoch and end with it, as the Trainer's own do, so that they know what a callback
    has changed in the data set in between. Those of ``persistent_workers`` do not.

    Args:
        loader: what ``get_train_dataloader()`` of the Trainer returned.
        per_epoch: batches that an epoch has.
        seed: of what the data set draws, and of a sampler that draws from a generator, torch's or its own.
        rank: this worker.
    """

    def __init__(self, loader: Any, per_epoch: int, *, seed: int, rank: int) -> None:
        self._loader = loader
        self._per_epoch = per_epoch
        self._seed, self._rank = seed, rank
        self._epoch, self._order = -1, list[list[int]]()  # the last epoch that was asked for
        self._source: Any
        if isinstance(loader.dataset, IterableDataset):
            self._source = LoaderBatches(loader, seed=seed, length=per_epoch)
        else:
            options = {name: getattr(loader, name) for name in _COPIED}
            workers = options.pop("num_workers")
            self._source = BatchSource(loader.dataset, self._key, workers, options)
        self._ends_with_epoch = isinstance(self._source, BatchSource) and not loader.persistent_workers

    def of(self, epoch: int, first: int, count: int) -> Iterator[Any]:
        """The batches of one update.

        Args:
            epoch: counted from 0.
            first: their place in the epoch.
            count: their number.
        """
        if self._ends_with_epoch and epoch != self._epoch:
            self._source.close()
            self._look_up(epoch)  # it tells the data set, before processes begin with a copy
        last = first + count >= self._per_epoch
        for place in range(first, first + count):
            batch = self._source[epoch * self._per_epoch + place]
            if (device := getattr(self._loader, "device", None)) is not None:
                batch = send_to_device(batch, device, non_blocking=self._loader._non_blocking)
            yield batch
        self._tell_accelerate(last=last)

    def _tell_accelerate(self, *, last: bool) -> None:
        """The prepared loader is at its end: ``gather_for_metrics()`` drops samples repeated there."""
        loader = self._loader
        if isinstance(loader, DataLoaderShard) and not isinstance(loader.dataset, IterableDataset):
            if loader.gradient_state.active_dataloader is not loader:
                loader.begin()
            loader.end_of_dataloader = last

    def _key(self, number: int) -> BatchKey:
        """The samples of a batch, counted on over all epochs.

        Raises:
            StopIteration: the batch is of another epoch than the one that processes have begun.
        """
        epoch, place = divmod(number, self._per_epoch)
        if epoch != self._epoch:
            if self._ends_with_epoch:
                raise StopIteration  # from a map() of all keys, which ends with it
            self._look_up(epoch)
        return BatchKey(self._order[place], [derive_seed(self._seed, number, self._rank)])

    def _look_up(self, epoch: int) -> None:
        self._order, self._epoch = self._order_of(epoch), epoch

    def _order_of(self, epoch: int) -> list[list[int]]:
        """The samples of all batches of an epoch."""
        loader = self._loader
        batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
        # As the Trainer does: some samplers are told by the loader, others are inside of a shard.
        for place in (loader, getattr(batches, "batch_sampler", None)):
            if (method := getattr(place, "set_epoch", None)) is not None:
                method(epoch)
        # Alike on all workers, a replacement included: some samplers draw from torch's own generator, others
        # from one of theirs, from which a lost worker has drawn for the epochs before.
        seed = derive_seed(self._seed, epoch)
        for sampler in _samplers_in(batches):
            if (generator := getattr(sampler, "generator", None)) is not None:
                generator.manual_seed(seed)
        with random_numbers_of(seed):
            return [list(samples) for samples in batches]


def _samplers_in(batches: Any) -> Iterator[Any]:
    """A batch sampler, and all that it takes samples from: a shard has another one in it."""
    while batches is not None:
        yield batches
        inner = getattr(batches, "batch_sampler", None)
        batches = inner if inner is not None else getattr(batches, "sampler", None)
