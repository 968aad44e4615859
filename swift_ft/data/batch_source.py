"""Loads any batch by its index, and in advance those that follow; the same sample at each attempt."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from swift_ft.data.forked_variables import ForkedVariables
from swift_ft.determinism import host_random_state, seed_host, set_host_random_state
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class BatchKey(NamedTuple):
    """The key of a batch: everything that determines its content.

    Attributes:
        samples: their indices in the data set.
        seeds: of what the data set draws at random, 63 bits: one for each sample, or one for all of them.
    """

    samples: list[int]
    seeds: list[int]


class BatchSource:
    """The batches of a map-style data set.

    With workers, the batches that follow the last one are loaded in advance. After a jump the workers begin
    again from there, and no batch is loaded that is not asked for. So they do when the script has changed
    something in the data set: a batch is made with what the data set has when it is asked for, by a worker,
    by this process, or by a replacement's.

    Args:
        dataset: map-style: it has ``__getitem__`` and ``__len__``.
        key_of: what makes the batch of an index. It must not refer to this object, which
            would keep its workers alive.
        num_workers: processes that load batches; 0 to load them when they are asked for.
        options: further arguments of ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        key_of: Callable[[int], BatchKey],
        num_workers: int,
        options: dict[str, Any],
    ) -> None:
        self._dataset = _Seeded(dataset)
        self._key_of = key_of
        self._num_workers = num_workers
        self._options = options
        self._ahead: Iterator[Any] | None = None
        self._forked: ForkedVariables | None = None  # what the workers have begun with
        self._warned = False
        self._next = 0  # the batch that comes next from the workers
        self._close_at_exit = partial(_close, weakref.ref(self))

    def __getitem__(self, index: int) -> Any:
        """The batch of an index.

        Raises:
            IndexError: for a negative one.
        """
        if index < 0:
            raise IndexError(f"Iterations count from 0, not {index}.")
        if self._num_workers == 0:
            return next(self._load([self._key_of(index)]))
        self._end_outdated_workers()
        if self._ahead is not None and index == self._next - 1:  # repeated: the workers need not begin anew
            batch = next(self._load([self._key_of(index)]))
        else:
            if self._ahead is None or index != self._next:
                self._ahead = None  # its workers end before others begin
                self._ahead = self._load(_From(self._key_of, index), self._num_workers)
                self._forked = ForkedVariables(self._dataset.inner, *self._options.values())
            self._next = index + 1
            batch = next(self._ahead)
        if self._forked is not None and self._forked.changed():
            self._forked.note()  # a data set may count, or fetch in advance, as batches are made
        return batch

    def _end_outdated_workers(self) -> None:
        """They are forks of this process: what it has changed in the data set since does not reach them."""
        if self._ahead is None or self._forked is None or not (names := self._forked.changed()):
            return
        self._ahead = None
        if not self._warned:
            self._warned = True
            _logger.warning(
                "%s changed after the processes began that load batches: they begin again with it, which "
                "takes time at each such change. Keep out of the data set what no sample depends on",
                shortened(names),
                extra={"event": "loading_begins_again", "variables": names},
            )

    def close(self) -> None:
        """End the workers, and forget what they have loaded. The next batch starts them again."""
        self._ahead = None

    def _load(self, keys: Iterable[BatchKey], num_workers: int = 0) -> Iterator[Any]:
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


class _From:
    """The keys of all batches from one on."""

    def __init__(self, key_of: Callable[[int], BatchKey], start: int) -> None:
        self._key_of = key_of
        self._start = start

    def __iter__(self) -> Iterator[BatchKey]:
        return map(self._key_of, itertools.count(self._start))


class _Seeded(Dataset[Any]):
    """A data set that draws the random numbers of a key, in whatever process."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    @property
    def inner(self) -> Dataset[Any]:
        """The data set itself."""
        return self._dataset

    def __getitems__(self, key: BatchKey) -> list[Any]:
        with random_numbers_of(key.seeds[0]):
            several = getattr(self._dataset, "__getitems__", None)
            if several is not None:
                samples: list[Any] = several(key.samples)
                return samples
            return list(self._one_by_one(key))

    def _one_by_one(self, key: BatchKey) -> Iterator[Any]:
        of_each = len(key.seeds) > 1
        for number, sample in enumerate(key.samples):
            if of_each:
                draw_from(key.seeds[number])
            yield self._dataset[sample]


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


def _close(source: weakref.ref[BatchSource]) -> None:
    if (living := source()) is not None:
        living.close()


def _without_workers(options: dict[str, Any]) -> dict[str, Any]:
    of_workers = {"prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"}
    return {name: value for name, value in options.items() if name not in of_workers}


def set_epoch(source: Any, epoch: int) -> None:
    """Tell a sampler, or what a loader draws its samples from, which epoch begins."""
    for place in (source, *samplers_of(source), getattr(source, "dataset", None)):
        method = getattr(place, "set_epoch", None)
        if method is not None:
            method(epoch)
            return


def samplers_of(loader: Any) -> tuple[Any, ...]:
    """A loader's samplers; None for each that it does not have."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)


@contextmanager
def random_numbers_of(seed: int) -> Iterator[None]:
    """Within the block, the host's random numbers (torch, Python, NumPy) are those of a 63-bit seed."""
    torch_state, host = torch.get_rng_state(), host_random_state()
    draw_from(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        set_host_random_state(host)


def draw_from(seed: int) -> None:
    """From now on, the host's random numbers are those of a 63-bit seed."""
    torch.default_generator.manual_seed(seed)
    seed_host(seed)
