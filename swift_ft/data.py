"""Batches by index: the same batch whenever a step asks for it, live, repeated or replayed.

batches = swift_ft.data.IndexedBatches(dataset, batch_size=32, shuffle=True, num_workers=4)
for step in session.steps(10_000):
    with step:
        x, y = batches[step.index]
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import itertools
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from swift_ft.determinism import derive_seed, host_random_state, seed_host, set_host_random_state
from swift_ft.errors import UsageError
from swift_ft.torch_adapters.core.tensors import tensors_in, version_of

__all__ = ["IndexedBatches", "LoaderBatches"]


_PR_SET_PDEATHSIG = 1


class IndexedBatches:
    """The batches of a map-style dataset, counted on over all epochs.

    The order is that of ``DistributedSampler``, whose ``set_epoch`` is called for each epoch, and of a
    ``DataLoader``. With workers, the batches that follow the last one are loaded in advance. After a jump the
    workers begin anew from there, and no batch is loaded that is not asked for.

    What a dataset draws at random (augmentation by torch, Python or NumPy) depends on the seed, the batch and
    the rank only, and leaves the random numbers of the training as they are.

    Args:
        dataset: map-style: it has ``__getitem__`` and ``__len__``.
        batch_size: samples per batch, on each replica.
        shuffle: another order in each epoch.
        seed: of the order, and of what the dataset draws.
        num_replicas: among how many the dataset is divided: ``session.replicas``. The stages of one pipeline
            all get the same batches, so for a single pipeline it is 1.
        rank: this worker's number among them: ``session.replica``.
        drop_last: drop the samples that do not fill a batch on every replica. Otherwise some samples are
            repeated, so that all replicas have as many, and the last batch of an epoch may be smaller.
        sampler: replaces the ``DistributedSampler`` that the arguments above describe. If it has a
            ``set_epoch``, its order may depend on that alone.
        num_workers: processes that load batches; 0 to load them when they are asked for.
        options: further arguments of ``DataLoader``, such as ``collate_fn`` and ``pin_memory``.

    Raises:
        UsageError: for an iterable-style dataset, or one that has not a single batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
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
        self._dataset = _Seeded(dataset, seed, rank)
        sampler = sampler or DistributedSampler(
            dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self._order = _Order(sampler, batch_size, drop_last)
        self._num_workers = num_workers
        self._options = options
        self._ahead: Iterator[Any] | None = None
        self._next = 0  # the batch that comes next from the workers
        self._close_at_exit = partial(_close, weakref.ref(self))
        if self.batches_per_epoch == 0:
            raise UsageError(f"The dataset does not fill a single batch of {batch_size} samples.")

    @property
    def batches_per_epoch(self) -> int:
        """Batches that one epoch has, on each replica."""
        return self._order.batches_per_epoch

    def __getitem__(self, index: int) -> Any:
        """The batch of an iteration, counted from 0. The first epoch is followed by the second, and so on."""
        if index < 0:
            raise IndexError(f"Iterations count from 0, not {index}.")
        if self._num_workers == 0:
            return next(self._load([self._order.key(index)]))
        if self._ahead is not None and index == self._next - 1:  # repeated: the workers need not begin anew
            return next(self._load([self._order.key(index)]))
        if self._ahead is None or index != self._next:
            self._ahead = None  # its workers end before others begin
            self._ahead = self._load(_From(self._order, index), self._num_workers)
        self._next = index + 1
        return next(self._ahead)

    def close(self) -> None:
        """End the workers. The next batch starts them again."""
        self._ahead = None

    def _load(self, keys: Iterable[_Key], num_workers: int = 0) -> Iterator[Any]:
        options = dict(self._options) if num_workers else _without_workers(self._options)
        if num_workers and sys.platform == "linux":
            options["worker_init_fn"] = partial(_begin_worker, os.getpid(), options.get("worker_init_fn"))
        generator = torch.Generator()  # from which the loader draws a seed, and not from the training's
        loader: Any = DataLoader(
            self._dataset,
            batch_sampler=keys,  # type: ignore[arg-type]  # what it yields goes to _Seeded.__getitems__
            num_workers=num_workers,
            generator=generator,
            **options,
        )
        batches: Iterator[Any] = iter(loader)
        if num_workers:  # at exit: before the loader, which would wait for workers that know of no end
            atexit.unregister(self._close_at_exit)
            atexit.register(self._close_at_exit)
        return batches


class _Key(NamedTuple):
    """Which samples make a batch."""

    number: int
    samples: list[int]


class _Order:
    """Which samples make the batches of each epoch.

    Args:
        sampler: of one epoch's samples.
        batch_size: samples per batch.
        drop_last: whether an epoch's last batch must be full.
    """

    def __init__(self, sampler: Sampler[int], batch_size: int, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self._epochs: dict[int, list[list[int]]] = {}  # the last two

    @property
    def batches_per_epoch(self) -> int:
        """On this replica."""
        return len(self._batch_sampler)

    def key(self, index: int) -> _Key:
        """Of a batch, counted on over all epochs."""
        epoch, position = divmod(index, len(self._batch_sampler))
        if epoch not in self._epochs:
            self._epochs = {n: order for n, order in self._epochs.items() if n == epoch - 1}
            _set_epoch(self._sampler, epoch)
            self._epochs[epoch] = list(self._batch_sampler)
        return _Key(index, self._epochs[epoch][position])


class _From:
    """The keys of all batches from one on."""

    def __init__(self, order: _Order, start: int) -> None:
        self._order = order
        self._start = start

    def __iter__(self) -> Iterator[_Key]:
        return map(self._order.key, itertools.count(self._start))


class _Seeded(Dataset[Any]):
    """A dataset that draws the same random numbers for the same batch, in whatever process."""

    def __init__(self, dataset: Dataset[Any], seed: int, rank: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._rank = rank

    def __getitems__(self, key: _Key) -> list[Any]:
        with _random_numbers_of(self._seed, key.number, self._rank):
            several = getattr(self._dataset, "__getitems__", None)
            if several is not None:
                samples: list[Any] = several(key.samples)
                return samples
            return [self._dataset[sample] for sample in key.samples]


def _begin_worker(parent: int, then: Callable[[int], None] | None, worker: int) -> None:
    """In a process that loads batches: end with the training, and not when it is missed some seconds later.

    Until then the process would keep the connections of a training process that was killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # in order: temporary files are removed
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        sys.exit(0)
    if then is not None:
        then(worker)


def _close(batches: weakref.ref[IndexedBatches]) -> None:
    if (living := batches()) is not None:
        living.close()


class LoaderBatches:
    """The batches of a loader that the script has made, counted on over all epochs.

    For a ``DataLoader`` over an iterable-style dataset, or for torchdata's ``StatefulDataLoader``. Its
    batches are taken one after the other. A repeated batch is still there; after any other jump the epoch is
    read again from its beginning. With a ``StatefulDataLoader``, make this object a part of
    ``Session(state)``: then a replacement continues from the state in the checkpoint. A replica gets the
    state of another one, whose loader is at other samples, so it reads the epoch again.

    What is drawn at random, by a sampler for example, depends on the seed and on the place in the epoch only.
    The state of a ``StatefulDataLoader`` does not hold what its workers draw.

    Args:
        loader: with a length, and with the same batches in each pass over the same epoch. ``set_epoch`` of
            its sampler or its dataset is called where there is one.
        seed: of what is drawn at random.

    Raises:
        UsageError: for a loader without a length, or without a batch.
    """

    def __init__(self, loader: Any, *, seed: int = 0) -> None:
        try:
            self._length = len(loader)
        except TypeError as error:
            raise UsageError(
                "LoaderBatches needs a loader with a length, to find a batch by its index: give its dataset "
                "a __len__."
            ) from error
        if self._length == 0:
            raise UsageError("The loader has no batch.")
        self._loader = loader
        self._seed = seed
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._kept: dict[int, _Kept] = {}  # the last batches
        self._loaded: tuple[int, Any] | None = None  # a state of the loader, before which batch
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # the batch that the iterator gives next

    def __getitem__(self, index: int) -> Any:
        """The batch of an iteration, counted from 0. The first epoch is followed by the second, and so on."""
        if index < 0:
            raise IndexError(f"Iterations count from 0, not {index}.")
        if index in self._kept and self._kept[index].unchanged:
            return _copied(self._kept[index].batch)
        if self._iterator is None or index != self._next or index % self._length == 0:
            self._seek(index)
        while self._next < index:
            self._take()
        batch = self._take()
        self._kept = {place: kept for place, kept in self._kept.items() if place == index - 1}
        self._kept[index] = _Kept(batch)
        return _copied(batch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, for ``Session(state)``."""
        if self._loaded is not None:
            return {"next": self._loaded[0], "loader": self._loaded[1], "rank": _rank()}
        inside = self._iterator is not None and self._next % self._length != 0
        return {
            "next": self._next,
            "loader": self._loader.state_dict() if self._stateful and inside else None,
            "rank": _rank(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there when that batch is asked for."""
        if state["next"] not in self._kept and state["next"] != self._next:
            own = state.get("rank", _rank()) == _rank()  # an earlier version did not say
            self._loaded = (state["next"], state["loader"] if own else None)

    def _seek(self, index: int) -> None:
        """Begin anew: where a state was loaded for, or at the beginning of the epoch."""
        self._iterator = None
        start = index - index % self._length
        place, state = self._loaded if self._loaded is not None else (start, None)
        self._loaded = None
        from_state = state is not None and start < place <= index
        _set_epoch(self._loader, start // self._length)
        _seed_samplers(self._loader, derive_seed(self._seed, start))
        with _random_numbers_of(self._seed, start):
            if from_state:
                self._loader.load_state_dict(state)
            self._iterator = iter(self._loader)
        self._next = place if from_state else start

    def _take(self) -> Any:
        assert self._iterator is not None
        with _random_numbers_of(self._seed, self._next):
            batch = next(self._iterator)
        self._next += 1
        return batch


class _Kept:
    """A batch that may be asked for again."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors_in(batch)]

    @property
    def unchanged(self) -> bool:
        """Whether no tensor was changed in place."""
        return all(version_of(tensor) == version for tensor, version in self._versions)


def _copied(batch: Any) -> Any:
    """A batch in new lists and dictionaries, with the same tensors."""
    if isinstance(batch, dict):
        return {key: _copied(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_copied(value) for value in batch)
    return batch if isinstance(batch, torch.Tensor) else copy.copy(batch)


def _rank() -> int:
    """Of the worker whose samples a loader reads."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def _random_numbers_of(*parts: int) -> Iterator[None]:
    """Within the block, the host's random numbers are those of these parts."""
    seed = derive_seed(*parts)
    torch_state, host = torch.get_rng_state(), host_random_state()
    torch.default_generator.manual_seed(seed)
    seed_host(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        set_host_random_state(host)


def _set_epoch(source: Any, epoch: int) -> None:
    """Tell a sampler, or what a loader draws its samples from, which epoch begins."""
    for place in (source, *_samplers_of(source), getattr(source, "dataset", None)):
        set_epoch = getattr(place, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
            return


def _seed_samplers(loader: Any, seed: int) -> None:
    """Give the samplers that draw at random a generator of their own, so that an epoch can be repeated."""
    for sampler in _samplers_of(loader):
        if hasattr(sampler, "generator"):
            sampler.generator = sampler.generator or torch.Generator()
            sampler.generator.manual_seed(seed)


def _samplers_of(loader: Any) -> tuple[Any, ...]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)


def _without_workers(options: dict[str, Any]) -> dict[str, Any]:
    of_workers = {"prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"}
    return {name: value for name, value in options.items() if name not in of_workers}
