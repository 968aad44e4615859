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

    What the data set draws at random depends on the seed, the batch and the rank only.

    Args:
        loader: what ``get_train_dataloader()`` of the Trainer returned.
        per_epoch: batches that an epoch has.
        seed: of what the data set draws, and of a sampler that draws from torch's own generator.
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

    def of(self, epoch: int, first: int, count: int) -> Iterator[Any]:
        """The batches of one update.

        Args:
            epoch: counted from 0.
            first: their place in the epoch.
            count: their number.
        """
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
        """The samples of a batch, counted on over all epochs."""
        epoch, place = divmod(number, self._per_epoch)
        if epoch != self._epoch:
            self._order, self._epoch = self._order_of(epoch), epoch
        return BatchKey(self._order[place], [derive_seed(self._seed, number, self._rank)])

    def _order_of(self, epoch: int) -> list[list[int]]:
        """The samples of all batches of an epoch."""
        loader = self._loader
        batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
        # As the Trainer does: some samplers are told by the loader, others are inside of a shard.
        for place in (loader, getattr(batches, "batch_sampler", None)):
            if (method := getattr(place, "set_epoch", None)) is not None:
                method(epoch)
        # Alike on all workers: some samplers draw from torch's own generator.
        with random_numbers_of(derive_seed(self._seed, epoch)):
            return [list(samples) for samples in batches]
