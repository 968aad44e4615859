"""Variables of a script that each replica has for itself: the mean of its losses, the name of its log.

A replacement receives the state of another replica. What was equal on all of them is right for it; what was
not stays as its own script has made it. Generators of random numbers are the exception: what they draw
changes the training, and no other worker knows the state of a lost one. So they are refused in the first
steps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from swift_ft.checkpoint.step.carried import CarriedVariables, Place, in_words
from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_NOTED_AT = 3
"""As the third step begins, two have changed what steps change."""
_NAMED = 5
"""Variables that a line names."""
_LOOKS = 32
"""Steps in which a worker looks for the notes of its replicas; they write them in the background."""


class OwnVariables:
    """Compares a worker's variables with those of its replicas.

    Args:
        rank: this worker.
        carried: its variables.
        rendezvous: where replicas note theirs.
        writer: notes this worker's.
    """

    def __init__(
        self, rank: int, carried: CarriedVariables, rendezvous: RendezvousStore, writer: BackgroundWriter
    ) -> None:
        self._rank = rank
        self._carried = carried
        self._rendezvous = rendezvous
        self._writer = writer
        self._steps = 0
        self._ours: Mapping[str, int] | None = None  # until they were compared
        # Filled in the writer's thread: the training thread asks the store for nothing (decision 56).
        self._theirs: Sequence[Mapping[str, int]] | None = None
        self._looking = False  # set by the training thread, cleared by the writer's

    def begin(self, iteration: int, replicas: Sequence[int]) -> None:
        """A step begins, live.

        Args:
            iteration: which one.
            replicas: ranks of this worker and its replicas.

        Raises:
            UnsupportedError: they have a generator in unlike states, and go on with it from step to step.
        """
        self._steps += 1
        # Only in the first steps, so that all later ones cost nothing.
        if self._steps < _NOTED_AT - 1 or self._steps > _LOOKS or len(replicas) < 2:
            return
        if self._steps == _NOTED_AT - 1:
            self._carried.note_generators()
        elif self._steps == _NOTED_AT:
            self._ours = self._carried.digests()
            self._writer.do(partial(self._note, json.dumps([iteration, self._ours])))
        elif self._ours is not None and self._theirs is not None:
            self._refuse_generators(replicas, self._ours, self._theirs)
            if len(self._theirs) > 1:
                _, self._carried.alike = _compared(self._theirs)
            self._ours = None
        elif self._ours is not None and not self._looking:
            self._looking = True
            self._writer.do(partial(self._look, replicas))

    def _note(self, digests: str) -> None:
        """In the writer's thread: the first worker of a rank notes. One that replaces it compares nothing."""
        if self._rendezvous.check([store_keys.variables(self._rank)]):
            self._theirs = ()
        else:
            self._rendezvous.set(store_keys.variables(self._rank), digests)

    def _look(self, replicas: Sequence[int]) -> None:
        """In the writer's thread: read what the replicas have noted, once all have."""
        if self._theirs is None and self._rendezvous.check([*map(store_keys.variables, replicas)]):
            self._theirs = self._noted(replicas)
        self._looking = False

    @contextmanager
    def kept(self, replicas: Sequence[int]) -> Iterator[None]:
        """Within the block, a state that is taken over leaves what is known to be unlike as it is."""
        have = [rank for rank in replicas if self._rendezvous.check([store_keys.variables(rank)])]
        self._carried.own, alike = _compared(noted := self._noted(have))
        if len(noted) > 1:
            self._carried.alike = alike
        if self._carried.own:
            names = [in_words(place) for place in sorted(self._carried.own)]
            _logger.info(
                "each replica has %s for itself: this worker keeps its own, as its script or the beginning "
                "of the step has left it",
                ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else ""),
                extra={"event": "own_variables", "variables": names},
            )
        try:
            yield
        finally:
            self._carried.own = frozenset()

    def _refuse_generators(
        self, replicas: Sequence[int], ours: Mapping[str, int], noted: Sequence[Mapping[str, int]]
    ) -> None:
        for rank, theirs in zip(replicas, noted, strict=False):
            first, last = sorted((rank, self._rank))
            for name in sorted(ours.keys() & theirs.keys()):
                if ours[name] != theirs[name] and self._carried.goes_on(_place(name)):
                    raise UnsupportedError(
                        f"The generator {in_words(_place(name))} goes on from step to step, "
                        f"and its state is not the same on workers {first} and {last}: the one of a lost "
                        "worker could not be brought back. Make it anew or seed it in each step, as in "
                        "generator.manual_seed(seed + step.index * world_size + rank), or draw from torch's "
                        "own, which is seeded by (seed, iteration, rank)."
                    )

    def _noted(self, ranks: Sequence[int]) -> list[dict[str, int]]:
        """The notes of workers; empty if they are of unlike iterations, because a loss came between."""
        notes = [json.loads(self._rendezvous.get(store_keys.variables(rank))) for rank in ranks]
        return [note for _, note in notes] if len({iteration for iteration, _ in notes}) == 1 else []


def _compared(noted: Sequence[Mapping[str, int]]) -> tuple[frozenset[Place], frozenset[Place]]:
    """Variables that are unlike on replicas, as these have noted them, and those that are equal on all."""
    every = {name for one in noted for name in one}
    unlike = {name for name in every if len({one.get(name) for one in noted}) > 1}
    return frozenset(map(_place, unlike)), frozenset(map(_place, every - unlike))


def _place(name: str) -> Place:
    path, _, variable = name.partition("\n")
    return path, variable
