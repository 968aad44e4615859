"""The random numbers of a sampler: they depend on the epoch, and not on when its order is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from swift_ft.checkpoint.step.kinds import GENERATORS, MOST_ELEMENTS, read_state, write_state
from swift_ft.data.batch_source import random_numbers_of
from swift_ft.determinism import derive_seed
from swift_ft.errors import UsageError

_MOST = 2**63 - 1
_OF_SAMPLERS = frozenset({"sampler", "samplers", "batch_sampler"})
"""Attributes that hold further samplers, whatever their class, an underscore before them or not."""


class Draws:
    """The numbers that a sampler draws in an epoch, from torch's, Python's, NumPy's and its own generators.

    A generator of the sampler's own is seeded by the seed that it has from the script. So it is alike where
    the script has seeded it alike, as samplers need it that divide one permutation among replicas.

    Args:
        sampler: draws. It may hold others.
        seed: for the numbers.
        rank: the replica's, for the numbers that are not of the sampler's own; None if the script has not
            said it.
    """

    def __init__(self, sampler: Any, seed: int, rank: int | None) -> None:
        self._sampler = sampler
        self._seed = seed
        self._rank = rank
        self._first_states = {id(one): (one, _number_of(one)) for one in _generators_of(sampler)}

    @contextmanager
    def of_epoch(self, epoch: int) -> Iterator[None]:
        """Within the block, all generators are those of an epoch. After it they are as they were.

        Raises:
            UsageError: replicas that have not said their rank would draw the same.
        """
        own = [(generator, read_state(generator)) for generator in _generators_of(self._sampler)]
        with random_numbers_of(derive_seed(self._seed, epoch, self._rank or 0)):
            for generator, _ in own:
                _, number = self._first_states.get(id(generator), (generator, _seed_of(generator)))
                _seed_with(generator, derive_seed(self._seed, epoch, number))
            before = _global_state()
            try:
                yield
            finally:
                for generator, state in own:
                    write_state(generator, state)
            if self._rank is None and _global_state() != before:
                _refuse_same_draws()


def _refuse_same_draws() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            "The sampler of these IndexedBatches draws at random, and which replica it is for was not said: "
            "all replicas would draw the same samples. Give IndexedBatches(rank=session.replica), which is 0 "
            "in all stages of a single pipeline.",
            alike=True,
        )


def _global_state() -> tuple[Any, ...]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(keys).tobytes(), position, torch.get_rng_state().tolist()


def _generators_of(sampler: Any) -> list[Any]:
    """Generators that a sampler holds, and those of samplers in it; none whose state cannot be set."""
    todo, seen, found = [sampler], dict[int, Any](), list[Any]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, GENERATORS):
            found += [one] if read_state(one) is not None else []
        elif isinstance(one, list | tuple | dict):
            few = len(one) <= MOST_ELEMENTS
            inner = (one.values() if isinstance(one, dict) else one) if few else ()
            todo += [value for value in inner if isinstance(value, (Sampler, *GENERATORS))]
        else:
            todo += [
                value
                for name, value in getattr(one, "__dict__", {}).items()
                if isinstance(value, (Sampler, list, tuple, dict, *GENERATORS))
                or name.lstrip("_") in _OF_SAMPLERS
            ]
    return found


def _seed_of(generator: Any) -> int:
    """The last seed of a generator; 0 of those that do not tell it."""
    return generator.initial_seed() & _MOST if isinstance(generator, torch.Generator) else 0


def _number_of(generator: Any) -> int:
    """A number that depends on how a generator was seeded, of at most 63 bits. It draws nothing."""
    if isinstance(generator, torch.Generator):
        return _seed_of(generator)
    state = read_state(generator)
    try:
        if isinstance(generator, np.random.BitGenerator):
            generator = np.random.Generator(generator)
        if isinstance(generator, np.random.Generator):
            return int(generator.integers(_MOST))
        if isinstance(generator, np.random.SeedSequence):
            return int(generator.generate_state(1, np.uint64)[0]) & _MOST
        if isinstance(generator, np.random.RandomState):
            return int(generator.randint(2**31 - 1))
        return int(generator.getrandbits(63))
    finally:
        write_state(generator, state)


def _seed_with(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator | np.random.BitGenerator):
        bits: Any = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.SeedSequence):
        write_state(generator, np.random.SeedSequence(seed).state)
    else:
        generator.seed(seed & 0xFFFFFFFF if isinstance(generator, np.random.RandomState) else seed)
