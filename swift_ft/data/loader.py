"""The batches of a loader that a script has made, counted on over all epochs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from swift_ft.data.batch_source import random_numbers_of, samplers_of, set_epoch
from swift_ft.data.forked_variables import EpochValues, ForkedVariables
from swift_ft.data.loader_position import LoaderPosition
from swift_ft.determinism import derive_seed
from swift_ft.errors import UsageError
from swift_ft.torch_core.tensors import tensors_in, version_of
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)

_END = object()
_OF_WORKERS = ("dataset", "collate_fn", "worker_init_fn")
"""Attributes of a loader that may hold objects of the script."""


class LoaderBatches:
    """The batches of a loader that the script has made, counted on over all epochs.

    For a ``DataLoader`` over an iterable-style dataset, or for torchdata's ``StatefulDataLoader``. Its
    batches are taken one after the other. A repeated batch is still there; after any other jump the epoch is
    read again from its beginning. With a ``StatefulDataLoader``, make this object a part of
    ``Session(state)``: then a replacement continues from the state in the checkpoint. A replica gets the
    state of another one, whose loader is at other samples, so it reads the epoch again.

    What is drawn at random, by a sampler for example, depends on the seed and on the place in the epoch only.
    The state of a ``StatefulDataLoader`` does not hold what its workers draw.

    What the data set, a sampler or a ``collate_fn`` counts in itself as it gives batches goes with the place
    in the epoch: it is neither put back with a step nor handed to a replacement, which reads the epoch.

    What the script sets in the data set counts at once without workers. Workers are forks of this process,
    and get it with the next epoch, in a replacement, too, if it is a number or another small value. A warning
    names what else was changed within an epoch.

    Args:
        loader: with the same batches in each pass over the same epoch. ``set_epoch`` of its sampler or its
            dataset is called where there is one.
        seed: of what is drawn at random.
        length: batches of an epoch, where the loader has no length: it is read so far and no further.

    Raises:
        UsageError: for a loader without a length, without a batch, or with workers that outlive an epoch; by
            a batch that an epoch does not have.
    """

    def __init__(self, loader: Any, *, seed: int = 0, length: int | None = None) -> None:
        try:
            self._length = len(loader) if length is None else length
        except TypeError as error:
            raise UsageError(
                "LoaderBatches needs to know how many batches an epoch has, to find one by its index: give "
                "length=, or the loader's dataset a __len__."
            ) from error
        if self._length == 0:
            raise UsageError("The loader has no batch.")
        if getattr(loader, "persistent_workers", False):
            raise UsageError(
                "LoaderBatches begins the workers of a loader anew in each epoch, so that what they draw at "
                "random can be repeated: leave out persistent_workers=True."
            )
        self._ends = length is None  # an epoch ends where the loader's does
        self._loader = loader
        self._seed = seed
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._kept: dict[int, KeptBatch] = {}  # the last batches
        self._loaded: tuple[int, Any] | None = None  # a state of the loader, before which batch
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # the batch that the iterator gives next
        self._position = LoaderPosition(loader)
        self._asked: list[Any] = []  # by its workers
        if getattr(loader, "num_workers", 0):
            self._asked = [getattr(loader, name, None) for name in _OF_WORKERS]
        self._forked: ForkedVariables | None = None  # what its workers have begun with
        self._at_begin = EpochValues(*self._asked)
        self._options = self._at_begin.held  # by this name reach() finds it
        self._warned = False

    def __getitem__(self, index: int) -> Any:
        """The batch of an iteration, counted from 0. The first epoch is followed by the second, and so on."""
        if index < 0:
            raise IndexError(f"Iterations count from 0, not {index}.")
        self._at_begin.keep(index // self._length)
        if index in self._kept and self._kept[index].unchanged:
            return copied(self._kept[index].batch)
        if self._iterator is None or index != self._next or index % self._length == 0:
            self._seek(index)
        else:
            self._warn_of_late_change()
        while self._next < index:
            self._take()
        batch = self._take()
        self._kept = {place: kept for place, kept in self._kept.items() if place == index - 1}
        self._kept[index] = KeptBatch(batch)
        return copied(batch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, for ``Session(state)``."""
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
            self._loaded = (state["next"], state["loader"] if state["rank"] == _rank() else None)

    def _seek(self, index: int) -> None:
        """Begin anew: where a state was loaded for, or at the beginning of the epoch."""
        start = index - index % self._length
        follows = self._next == index == start
        if follows and self._iterator is not None and self._ends:
            self._finish()
        self._iterator = None
        place, state = self._loaded if self._loaded is not None else (start, None)
        self._loaded = None
        from_state = state is not None and start < place <= index
        self._position.begin(start // self._length, jumps=not follows)
        seed = derive_seed(self._seed, start)
        with random_numbers_of(seed), self._position.giving():
            set_epoch(self._loader, start // self._length)
            seed_generators(self._loader, seed)
            if from_state:
                self._loader.load_state_dict(state)
            self._begin(start // self._length)
        self._next = place if from_state else start

    def _begin(self, epoch: int) -> None:
        """Begin to iterate. Workers begin with what the data set had as the first of this epoch began."""
        if not self._asked:
            self._iterator = iter(self._loader)
            return
        with self._at_begin.of(epoch):
            self._iterator = iter(self._loader)
        self._forked = None if self._warned else ForkedVariables(*self._asked)

    def _warn_of_late_change(self) -> None:
        """Say once that a large change within an epoch would reach a replacement before its time."""
        if self._forked is None or not (names := self._forked.changed(unless_small=True)):
            return
        self._warned, self._forked = True, None
        _logger.warning(
            "%s changed in the middle of an epoch: the loader's processes get it with the next epoch, and "
            "those of a replacement at once, whose batches would be others for the rest of the epoch. Change "
            "it before an epoch's first batch, or leave out num_workers",
            shortened(names),
            extra={"event": "changed_within_epoch", "variables": names},
        )

    def _finish(self) -> None:
        """An epoch is over: what an iterable data set does behind its last sample is done, too."""
        assert self._iterator is not None
        with random_numbers_of(derive_seed(self._seed, self._next)), self._position.giving():
            next(self._iterator, _END)

    def _take(self) -> Any:
        assert self._iterator is not None
        with random_numbers_of(derive_seed(self._seed, self._next)), self._position.giving():
            batch = next(self._iterator, _END)
        if self._forked is not None and self._forked.changed():
            self._forked.note()  # as the loader made a batch
        if batch is _END:
            raise UsageError(
                f"The loader's epoch ended after {self._next % self._length} batches of {self._length}: its "
                "length, or length=, must be what each epoch has."
            )
        self._next += 1
        return batch


class KeptBatch:
    """A batch that may be asked for again."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors_in(batch)]

    @property
    def unchanged(self) -> bool:
        """Whether no tensor was changed in place."""
        return all(version_of(tensor) == version for tensor, version in self._versions)


def copied(batch: Any) -> Any:
    """A batch in new lists and dictionaries, with the same tensors."""
    if isinstance(batch, dict):
        return {key: copied(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(copied(value) for value in batch)
    return batch if isinstance(batch, torch.Tensor) else copy.copy(batch)


def _rank() -> int:
    """Of the worker whose samples a loader reads."""
    return dist.get_rank() if dist.is_initialized() else 0


def seed_generators(loader: Any, seed: int) -> None:
    """Seed a loader's generator, from which its workers' seeds come, and those of its samplers.

    Samplers that draw at random are given one of their own, so that an epoch can be repeated.
    """
    if (own := getattr(loader, "generator", None)) is not None:
        own.manual_seed(seed)
    for sampler in samplers_of(loader):
        if hasattr(sampler, "generator"):
            sampler.generator = sampler.generator or torch.Generator()
            sampler.generator.manual_seed(seed)
