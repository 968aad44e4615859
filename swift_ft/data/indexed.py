"""Each replica's batches, in the order of ``DistributedSampler``."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler

from swift_ft.data.batch_source import BatchKey, BatchSource, set_epoch
from swift_ft.data.draws import Draws
from swift_ft.determinism import derive_seed
from swift_ft.errors import UsageError


class IndexedBatches:
    """The batches of a map-style dataset, counted on over all epochs.

    The order is that of ``DistributedSampler``, whose ``set_epoch`` is called for each epoch, and of a
    ``DataLoader``. With workers, the batches that follow the last one are loaded in advance. After a jump the
    workers start again from there, and no batch is loaded that is not asked for.

    What a dataset draws at random (augmentation by torch, Python or NumPy) depends on the seed, the batch and
    the rank only, and leaves the random numbers of the training as they are. So does what a sampler draws: it
    depends on the seed, the epoch and the rank, or for a generator of its own on how the script has seeded
    that, instead of the rank.

    What the script sets in the dataset counts from the next batch on. Where there are workers, they begin
    again with it, so set it now and then only.

    Which samples make a batch depends on the number of replicas. :class:`GlobalBatches` stays the same.

    Args:
        dataset: map-style: it has ``__getitem__`` and ``__len__``.
        batch_size: samples per batch, on each replica.
        shuffle: another order in each epoch.
        seed: of the order, and of what the dataset draws.
        num_replicas: among how many the dataset is divided: ``session.replicas``. The stages of one pipeline
            all get the same batches, so for a single pipeline it is 1.
        rank: this worker's number among them: ``session.replica``. If left out, it is 0; a sampler that draws
            at random is refused then where there are several workers.
        drop_last: drop the samples that do not fill a batch on every replica. Otherwise some samples are
            repeated, so that all replicas have as many, and the last batch of an epoch may be smaller.
        sampler: replaces the ``DistributedSampler`` that the arguments above describe. Its order may depend
            on its ``set_epoch``, if it has one, and on what it draws at random.
        num_workers: processes that load batches; 0 to load them when they are asked for.
        options: further arguments of ``DataLoader``, such as ``collate_fn`` and ``pin_memory``.

    Raises:
        UsageError: for an iterable-style dataset, or one that has not a single batch; by a batch whose
            sampler draws at random without a rank.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int | None = None,
        drop_last: bool = False,
        sampler: Sampler[int] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                "IndexedBatches takes a map-style dataset. For an iterable one, make a DataLoader or a "
                "StatefulDataLoader, and use swift_ft.data.LoaderBatches(loader)."
            )
        sampler = sampler or DistributedSampler(
            dataset,
            num_replicas=num_replicas,
            rank=rank or 0,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self._order = _Order(sampler, batch_size, drop_last, seed=seed, rank=rank)
        self._source = BatchSource(dataset, self._order.key, num_workers, options)
        if self.batches_per_epoch == 0:
            raise UsageError(f"The dataset does not fill a single batch of {batch_size} samples.")

    @property
    def batches_per_epoch(self) -> int:
        """Batches that one epoch has, on each replica."""
        return self._order.batches_per_epoch

    def __getitem__(self, index: int) -> Any:
        """The batch of an iteration, counted from 0. The first epoch is followed by the second, and so on."""
        return self._source[index]

    def close(self) -> None:
        """End the workers. The next batch starts them again."""
        self._source.close()


class _Order:
    """The samples of each batch in each epoch, and the batch's seed.

    Args:
        sampler: of one epoch's samples.
        batch_size: samples per batch.
        drop_last: whether an epoch's last batch must be full.
        seed: for what the dataset draws at random.
        rank: the replica's; None if the script has not said it.
    """

    def __init__(
        self, sampler: Sampler[int], batch_size: int, drop_last: bool, *, seed: int, rank: int | None
    ) -> None:
        self._sampler = sampler
        self._batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self._draws = Draws(sampler, seed, rank)
        self._seed = seed
        self._rank = rank or 0
        self._epochs: dict[int, list[list[int]]] = {}  # the last two

    @property
    def batches_per_epoch(self) -> int:
        """On this replica."""
        return len(self._batch_sampler)

    def key(self, index: int) -> BatchKey:
        """The samples and the seed of a batch, counted on over all epochs."""
        epoch, position = divmod(index, len(self._batch_sampler))
        if epoch not in self._epochs:
            self._epochs = {n: order for n, order in self._epochs.items() if n == epoch - 1}
            with self._draws.of_epoch(epoch):
                set_epoch(self._sampler, epoch)
                self._epochs[epoch] = list(self._batch_sampler)
        return BatchKey(self._epochs[epoch][position], [derive_seed(self._seed, index, self._rank)])
