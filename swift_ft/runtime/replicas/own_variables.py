"""Variables of a script that each replica has for itself: the mean of its losses, the best of its models.

A replacement receives the state of another replica. What was equal on all of them is right for it. What was
not, in the third step or in the last checkpoint, comes from what the lost worker noted in that checkpoint, or
stays as its own script has made it. Generators of random numbers are the exception: what they draw
changes the training, and no other worker knows the state of a lost one. So they are refused in the first
steps. Where a loss comes before that, a generator that was not seeded alike stays the replacement's own, and
all replicas note their variables again: so it is still refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial

from swift_ft.checkpoint.step.carried import CarriedVariables
from swift_ft.checkpoint.step.places import Place, Saved, in_words, key_of, place_of_key
from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)

_NOTED_AFTER = 2
"""Steps of a generation: two have changed what steps change."""
_NAMED = 12
"""Variables that a line names."""
_LOOKS = 32
"""Steps in which a worker looks for the notes of its replicas; they write them in the background."""
_BUFFERS = "(buffers of layers)"
"""The path of places that stand for saved buffers of layers, which no variable of the script is."""
_MOST_BYTES = 2**16
"""Of the values that a worker notes for its replacement: the rendezvous store is in a machine's memory."""


@dataclass(frozen=True)
class _Note:
    """A worker's variables, those that are not as at the start.

    Attributes:
        iteration: completed iterations.
        digests: by path and name.
        values: the small ones themselves, packed, in base64.
    """

    iteration: int
    digests: Mapping[str, int] = field(default_factory=dict)
    values: str = ""


class OwnVariables:
    """Compares a worker's variables with those of its replicas.

    Args:
        rank: this worker.
        carried: its variables.
        rendezvous: where replicas note theirs.
        writer: notes this worker's.

    Attributes:
        buffers_of_layers: returns digests of those that a ``state_dict()`` has, by name, where pipelines are
            replicas. They come with a layer, and no notes have their values.
    """

    def __init__(
        self, rank: int, carried: CarriedVariables, rendezvous: RendezvousStore, writer: BackgroundWriter
    ) -> None:
        self._rank = rank
        self._carried = carried
        self._rendezvous = rendezvous
        self._writer = writer
        self.buffers_of_layers: Callable[[], Mapping[str, int]] = dict  # the session gives it
        self._seeds: Mapping[str, int] | None = None  # of generators, before this process had another's state
        self._compared = False  # for all time
        self._first: int | None = None  # iteration of this generation
        self._noting = self._has_noted = False  # in this generation, and at any time
        # Filled in the writer's thread: the training thread asks the store for nothing (decision 56). Empty
        # if there is nothing to compare.
        self._noted_by_all: Sequence[Mapping[str, int]] | None = None
        self._looking = False  # set by the training thread, cleared by the writer's

    def live(self) -> None:
        """Training goes on in another generation, with the same iteration on all replicas."""
        self._first, self._noting, self._noted_by_all = None, False, None

    def begin(self, iteration: int, replicas: Sequence[int]) -> None:
        """A step begins, live.

        Args:
            iteration: which one.
            replicas: ranks of this worker and its replicas.

        Raises:
            UnsupportedError: they have a generator in unlike states, and go on with it from step to step.
        """
        # Only in the first steps, so that all later ones cost nothing.
        if self._compared or len(replicas) < 2:
            return
        if self._first is None:
            self._first = iteration
            self._writer.set(store_keys.generators(self._rank), json.dumps(self._seeds_here()))
        steps = iteration - self._first
        if steps == _NOTED_AFTER - 1:
            self._carried.note_generators()
        elif steps == _NOTED_AFTER and not self._noting:
            self._noting = True
            self._writer.do(partial(self._note, iteration, self._digests(), replicas))
        elif self._noted_by_all is not None:
            self._compare(replicas, self._noted_by_all)
        elif self._noting and steps > _LOOKS:
            self._compared = True  # a replica has never come so far
        elif self._noting and not self._looking:
            self._looking = True
            self._writer.do(partial(self._look, replicas))

    def _digests(self) -> dict[str, int]:
        of_buffers = {key_of((_BUFFERS, name)): one for name, one in self.buffers_of_layers().items()}
        return self._carried.digests() | of_buffers

    def _compare(self, replicas: Sequence[int], noted: Sequence[Mapping[str, int]]) -> None:
        self._compared = True
        if noted:
            self._refuse_generators(replicas, noted)
            _, self._carried.alike = _compared(noted)

    def _note(self, iteration: int, digests: Mapping[str, int], replicas: Sequence[int]) -> None:
        """In the writer's thread. Notes that all have made before a loss hold.

        Then a worker that has made none, in the place of one that had, has nothing to compare: what it goes
        on with is what it was given.
        """
        if noted := self._noted_of(replicas):
            self._noted_by_all = noted if self._has_noted else ()
        else:
            self._has_noted = True
            self._rendezvous.set(store_keys.variables(self._rank), json.dumps([iteration, digests]))

    def _look(self, replicas: Sequence[int]) -> None:
        """In the writer's thread: read what the replicas have noted, once all have."""
        if self._noted_by_all is None:
            self._noted_by_all = self._noted_of(replicas) or None
        self._looking = False

    def _noted_of(self, replicas: Sequence[int]) -> list[dict[str, int]]:
        """The notes of all; empty as long as one of them has none of the same iteration."""
        all_have = self._rendezvous.check([*map(store_keys.variables, replicas)])
        return self._noted(replicas) if all_have else []

    def note(self, iteration: int, replicas: Sequence[int]) -> None:
        """Note the variables for a replacement, as a checkpoint has them.

        Args:
            iteration: completed iterations, as on all replicas that note now.
            replicas: ranks of this worker and its replicas.
        """
        if len(replicas) > 1:
            self._writer.do(partial(self._note_kept, iteration, self._carried.to_save()))

    def _note_kept(self, iteration: int, saved: Saved) -> None:
        """In the writer's thread."""
        values = self._carried.packed(saved, _MOST_BYTES)
        note = _Note(iteration, self._carried.digests_of(saved), values)
        earlier = [one for one in self._kept_by(self._rank) if one.iteration < iteration]
        # Two: a loss may come when one replica has noted the last one, and another has not.
        notes = [asdict(one) for one in (*earlier[-1:], note)]
        self._rendezvous.set(store_keys.variables_kept(self._rank), json.dumps(notes))

    @contextmanager
    def kept(
        self,
        replicas: Sequence[int],
        iteration: int,
        *,
        own_at: int | None,
        shared: Callable[[Place], bool] = lambda _: False,
    ) -> Iterator[None]:
        """Within the block, a state that is taken over leaves what is known to be unlike as it is.

        Args:
            replicas: ranks of this worker and its replicas.
            iteration: of the state, which may be an earlier one than that of the last notes.
            own_at: the iteration of this process's own values; None if it has begun in the place of a lost
                one, whose notes tell what it had.
            shared: tells of a place whether it belongs to what a worker holds, and not to the worker: layers
                that have moved.
        """
        carried, every = self._carried, set[str]()
        have = [rank for rank in replicas if self._rendezvous.check([store_keys.variables(rank)])]
        carried.own, alike = _compared(noted := self._noted(have))
        if len(noted) > 1:
            carried.alike, every = alike, _in_all(noted)
        if len(noted) < len(replicas):
            carried.own |= self._seeded_unlike(replicas)
        own_note = _Note(0)
        if last := self._last_kept(replicas, iteration):
            unlike, alike = _compared(digests := [note.digests for note in last])
            every |= _in_all(digests)
            carried.own, carried.alike = carried.own | unlike, alike - carried.own
            own_note = last[replicas.index(self._rank)]
        comes = frozenset(place for place in carried.own if place[0] == _BUFFERS or shared(place))
        carried.own -= comes
        # One that a note lacks may be in a layer that its worker did not have.
        self._say_what_comes({place for place in comes if key_of(place) in every})
        if own_at is None and own_note.values:
            carried.of_own = _only(carried.unpacked(own_note.values), carried.own)
        given = frozenset((path, name) for path, values in carried.of_own.items() for name in values)
        if own_at is None:
            carried.behind = carried.own
            if own_note.iteration == iteration:  # what is not in the note was as at the start: so it is here
                missed = (place for place in carried.own - given if key_of(place) in own_note.digests)
                carried.behind = frozenset(missed)
        elif own_at != iteration:
            carried.behind = carried.own
        self._say_what_is_own(own_note, given)
        try:
            yield
        finally:
            carried.own, carried.of_own, carried.behind = frozenset(), {}, frozenset()

    def _say_what_is_own(self, note: _Note, given: frozenset[Place]) -> None:
        as_noted = f"as it was in iteration {note.iteration}, by the notes of its rank"
        as_made = "as its script or the beginning of the step has left it"
        for places, words in ((given, as_noted), (self._carried.own - given, as_made)):
            if names := [in_words(place) for place in sorted(places)]:
                _logger.info(
                    "each replica has %s for itself: this worker keeps its own, %s",
                    shortened(names, _NAMED),
                    words,
                    extra={"event": "own_variables", "variables": names},
                )

    def _say_what_comes(self, places: Collection[Place]) -> None:
        names = sorted(name if path == _BUFFERS else in_words((path, name)) for path, name in places)
        if names:
            _logger.warning(
                "each pipeline has %s for itself: this worker goes on with what comes with its layers, from "
                "another pipeline or from the one that saved them. What follows from it differs from a run "
                "without a loss",
                shortened(names, _NAMED),
                extra={"event": "own_values_lost", "variables": names},
            )

    def _seeded_unlike(self, replicas: Sequence[int]) -> frozenset[Place]:
        """Generators that this worker's script has seeded as that of another replica has not."""
        keys = [store_keys.generators(rank) for rank in replicas if rank != self._rank]
        theirs = [json.loads(self._rendezvous.get(key)) for key in keys if self._rendezvous.check([key])]
        ours = self._seeds_here().items()
        unlike = (name for name, seed in ours if any(one.get(name, seed) != seed for one in theirs))
        return frozenset(map(place_of_key, unlike))

    def _seeds_here(self) -> Mapping[str, int]:
        if self._seeds is None:
            self._seeds = self._carried.digests_of_generators()
        return self._seeds

    def _refuse_generators(self, replicas: Sequence[int], noted: Sequence[Mapping[str, int]]) -> None:
        ours = noted[replicas.index(self._rank)]
        for rank, theirs in zip(replicas, noted, strict=False):
            first, last = sorted((rank, self._rank))
            for name in sorted(ours.keys() & theirs.keys()):
                if ours[name] != theirs[name] and self._carried.goes_on(place_of_key(name)):
                    raise UnsupportedError(
                        f"The generator {in_words(place_of_key(name))} goes on from step to step, "
                        f"and its state is not the same on workers {first} and {last}: the one of a lost "
                        "worker could not be brought back. Make it anew or seed it in each step, as in "
                        "generator.manual_seed(seed + step.index * world_size + rank), or draw from torch's "
                        "own, which is seeded by (seed, iteration, rank).",
                        alike=True,
                    )

    def _noted(self, ranks: Sequence[int]) -> list[dict[str, int]]:
        """The notes of workers; empty if they are of unlike iterations, because a loss came between."""
        notes = [json.loads(self._rendezvous.get(store_keys.variables(rank))) for rank in ranks]
        return [note for _, note in notes] if len({iteration for iteration, _ in notes}) == 1 else []

    def _last_kept(self, ranks: Sequence[int], iteration: int) -> list[_Note]:
        """A note of each worker, of the last iteration up to this one that all have noted; or empty."""
        each = [
            {note.iteration: note for note in self._kept_by(rank) if note.iteration <= iteration}
            for rank in ranks
        ]
        common = set[int].intersection(*(set(notes) for notes in each)) if each else set[int]()
        return [notes[max(common)] for notes in each] if common else []

    def _kept_by(self, rank: int) -> list[_Note]:
        key = store_keys.variables_kept(rank)
        if not self._rendezvous.check([key]):
            return []
        return [_Note(**note) for note in json.loads(self._rendezvous.get(key))]


def _in_all(noted: Sequence[Mapping[str, int]]) -> set[str]:
    """Names that all notes have."""
    return set.intersection(*map(set, noted))


def _only(saved: Saved, places: frozenset[Place]) -> Saved:
    return {
        path: {name: value for name, value in values.items() if (path, name) in places}
        for path, values in saved.items()
    }


def _compared(noted: Sequence[Mapping[str, int]]) -> tuple[frozenset[Place], frozenset[Place]]:
    """Variables that are unlike on replicas, as these have noted them, and those that are equal on all."""
    every = {name for one in noted for name in one}
    unlike = {name for name in every if len({one.get(name) for one in noted}) > 1}
    return frozenset(map(place_of_key, unlike)), frozenset(map(place_of_key, every - unlike))
