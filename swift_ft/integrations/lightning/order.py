"""The order of the samples: what samplers draw at random, apart from what a data set draws for its batches.

Lightning divides a loader's samples among the workers: each takes its share of one order, so all must draw
the same one. A loader that it leaves alone is the script's own matter, as under torchrun: its order is alike
on workers that have given torch the same seed, and differs on others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from swift_ft.data.batch_source import random_numbers_of, samplers_of
from swift_ft.data.loader import seed_generators
from swift_ft.determinism import derive_seed
from swift_ft.integrations.lightning.host import part

_set_sampler_epoch = part("loops.fit_loop")._set_sampler_epoch
_DistributedSamplerWrapper = part("trainer.connectors.data_connector").DistributedSamplerWrapper

_END = object()


class Order:
    """The samplers of a Trainer's loaders.

    Args:
        loaders: as Lightning has prepared them.
        seed: decides what samplers draw, with the pass.

    Attributes:
        script_seed: the seed that the script has given torch, in this worker or in the one that it replaces.
    """

    def __init__(self, loaders: Sequence[Any], seed: int) -> None:
        self._loaders = loaders
        self._seed = seed
        self.script_seed = torch.initial_seed() & (2**63 - 1)
        self._drawn: list[_Drawn | None] = [None] * len(loaders)

    def begin(self, number: int, epoch: int) -> None:
        """A pass over all loaders begins.

        Args:
            number: of the pass, which decides what is drawn.
            epoch: samplers are told of it, as by Lightning.
        """
        for place, loader in enumerate(self._loaders):
            _set_sampler_epoch(loader, epoch)
            seed = derive_seed(self._seed, number, place, 0 if _is_divided(loader) else self.script_seed)
            for one in (loader, *_divided_by(loader)):
                seed_generators(one, seed)
            if (name := _source_of_indices(loader)) is not None:
                self._drawn[place] = _Drawn(getattr(loader, name), seed)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the block loaders may be read: samplers draw random numbers of their own."""
        swapped = [
            (vars(loader), name, drawn)
            for loader, drawn in zip(self._loaders, self._drawn, strict=True)
            if drawn is not None and (name := _source_of_indices(loader)) is not None
        ]
        for variables, name, drawn in swapped:
            variables[name] = drawn  # past DataLoader.__setattr__, which refuses another one for good
        try:
            yield
        finally:
            for variables, name, drawn in swapped:
                variables[name] = drawn.samplers

    def epochs_told(self) -> list[int | None]:
        """The epoch that the script has told each data set, as far as these say so in ``epoch``."""
        return [_epoch_of(loader) for loader in self._loaders]

    def tell_epochs(self, told: Sequence[int | None]) -> bool:
        """Tell data sets what the script told them: a replacement has not. Whether any had another epoch."""
        behind = [
            (loader.dataset, epoch)
            for loader, epoch in zip(self._loaders, told, strict=True)
            if epoch is not None and _epoch_of(loader) not in (None, epoch)
        ]
        for dataset, epoch in behind:
            dataset.set_epoch(epoch)
        return bool(behind)


class _Drawn:
    """Samplers that draw random numbers of their own.

    Args:
        samplers: what gives a loader its indices.
        seed: decides what they draw.
    """

    def __init__(self, samplers: Iterable[Any], seed: int) -> None:
        self.samplers = samplers
        self._seed = seed
        self._begun = 0  # a shorter loader begins again within a pass

    def __iter__(self) -> Iterator[Any]:
        cycle, self._begun = self._begun, self._begun + 1
        with random_numbers_of(derive_seed(self._seed, cycle)):
            indices = iter(self.samplers)
        for number in itertools.count():
            with random_numbers_of(derive_seed(self._seed, cycle, number)):
                found = next(indices, _END)
            if found is _END:
                return
            yield found

    def __len__(self) -> int:
        return len(self.samplers)  # type: ignore[arg-type]  # as of the samplers


def _source_of_indices(loader: Any) -> str | None:
    """The name of the attribute that a loader takes indices from; None where it is not to be touched.

    A loader that can be saved saves the state of its samplers, too.
    """
    if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
        return None
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _is_divided(loader: Any) -> bool:
    """Whether each worker reads its share of one order, which all must draw alike."""
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers_of(loader))


def _divided_by(loader: Any) -> Iterator[Any]:
    """The script's samplers within Lightning's own, which divide what they draw, each as of a loader."""
    for sampler in samplers_of(loader):
        if isinstance(sampler, _DistributedSamplerWrapper):
            inner = sampler.dataset._sampler
            yield SimpleNamespace(sampler=inner, batch_sampler=inner)


def _epoch_of(loader: Any) -> int | None:
    dataset = getattr(loader, "dataset", None)
    epoch = getattr(dataset, "epoch", None) if hasattr(dataset, "set_epoch") else None
    return epoch if type(epoch) is int else None
