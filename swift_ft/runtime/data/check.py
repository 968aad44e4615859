"""Checks that a repeated iteration gets the batch that it had before.

After a loss an iteration is repeated, or replayed. A script that takes its batches from an iterator gives it
the next one instead: nothing fails, and the weights are not those of an undisturbed run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.data.shares import Change, shares_at
from swift_ft.errors import ChangedBatchError, UsageError
from swift_ft.runtime.data.digest import BatchDigest
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import storage_id, tensors_in

_logger = logging.getLogger(__name__)

_REMEDY = (
    "Look batches up by step.index, as in `x, y = batches[step.index]`: swift_ft.data.IndexedBatches makes "
    "that of a Dataset. What is random in a batch may depend on step.index only. "
    "Session(check_data=False) switches this check off."
)


KeptAhead = Mapping[int, tuple[str, torch.Tensor]]
"""Tensors by their memory, and their names."""
_LOOKS = 4
"""Steps of a process in which batches are looked for that were kept ahead."""
_CHUNK = 64
"""Iterations under one key of the rendezvous store."""


class BatchCheck:
    """Compares what the script gives to the schedule, or to the DDP model, with what it gave before.

    Args:
        board: remembers digests, those of an earlier worker of this rank included.
        enabled: False to do nothing.
        keep: iterations before the last committed checkpoint that may still be repeated.
        has_position: an object of the session's state may say which batch comes next.
        iterators: finds the names of iterators that the script may take its batches from.
        further_iterators: finds more of them, of which some may have nothing to do with batches.
        kept_ahead: finds tensors that objects keep beside such an iterator, and how the script calls them.
        in_doubt: whether an abort may have changed what this worker has received in the running step.

    Attributes:
        asked: the script has asked for the index of a step, of any so far.
    """

    def __init__(
        self,
        board: BatchBoard,
        *,
        enabled: bool,
        keep: int,
        has_position: bool = False,
        iterators: Callable[[], Sequence[str]] = list,
        further_iterators: Callable[[], Sequence[str]] = list,
        kept_ahead: Callable[[], KeptAhead] = dict,
        in_doubt: Callable[[], bool] = lambda: False,
    ) -> None:
        # Owner of all fields: the training thread.
        self.enabled = enabled
        self._board = board
        self._keep = keep
        self._has_position = has_position
        self._iterators = iterators
        self._further_iterators = further_iterators
        self._looked_for_iterators = False
        self._find_ahead = kept_ahead
        self._in_doubt = in_doubt
        self._looks_left = _LOOKS
        self._ahead: KeptAhead | None = None  # as the step began; None where nobody looked
        self._ahead_before: KeptAhead | None = None  # and the one before it
        self._iteration: int | None = None  # None outside of `with step:`
        self._begun: int | None = None  # the iteration whose step began last
        self._given = 0  # in this step
        self._index_read = self.asked = False
        self._changes: Sequence[Change] = ()
        self._fresh = True  # this process has been given no batch yet
        self._on_device: list[tuple[int, BatchDigest]] = []  # that a GPU computes, by iteration

    def follow(self, changes: Sequence[Change]) -> None:
        """Batches are dealt otherwise from some iterations on: what was given for these before was other."""
        self._changes = changes

    def begin(self, iteration: int, committed: int) -> None:
        """The step of an iteration begins; the last committed checkpoint is of the other one."""
        self._iteration = self._begun = iteration
        self._given, self._index_read = 0, False
        self._look_for_kept_ahead()
        self._publish_arrived()
        self._board.drop_before(committed - self._keep)

    def index_read(self) -> None:
        """The script has asked for the step's index."""
        self._index_read = self.asked = True

    def end(self) -> None:
        """The body of the step has ended: what models are given now is the script's own business."""
        self._iteration = None

    def interrupted(self) -> None:
        """The step was interrupted: it will be repeated."""
        self.end()
        self._publish_arrived(wait=True)

    def settle(self) -> None:
        """An abort is about to leave anything in memory: what has arrived by now is right. In its thread."""
        for _, digest in [*self._on_device]:
            digest.settled = digest.settled or digest.ready

    def given(self, values: Any) -> None:
        """The script gives a batch to the schedule or to the model.

        Raises:
            ChangedBatchError: if this iteration had another one before.
        """
        iteration = self._iteration
        if not self.enabled or iteration is None:
            return
        digest = BatchDigest(values)
        if digest.empty:
            return
        self._refuse_kept_ahead(values)
        number, self._given = self._given, self._given + 1
        known = self._board.of(iteration, shares_at(self._changes, iteration))
        if number < len(known):
            if digest.value != known[number]:
                raise ChangedBatchError(
                    f"Iteration {iteration} is repeated after a failure, and got another batch than before. "
                    f"{_REMEDY}",
                    iteration=iteration,
                    alike=not self._index_read,  # else it may be the data of this machine
                )
        elif self._fresh and self._begins_anew(iteration, digest):
            raise ChangedBatchError(
                f"A replacement got the very first batch again, for iteration {iteration}. {_REMEDY}",
                iteration=iteration,
                alike=True,
            )
        else:
            self._warn_of_resumption(iteration)
            self._on_device.append((iteration, digest))
            self._publish_arrived()
            self._warn_of_iterators()
        self._fresh = False

    def _look_for_kept_ahead(self) -> None:
        looks = self.enabled and self._looks_left > 0
        self._looks_left -= looks
        self._ahead_before, self._ahead = self._ahead, self._find_ahead() if looks else None

    def _refuse_kept_ahead(self, values: Any) -> None:
        """In the first steps: a batch was kept beside the iterator before the step that it is given in.

        The batch goes back with a repeated step and the iterator does not, so that the next one is left out.

        Raises:
            UsageError: names what kept it.
        """
        if self._ahead is None or self._ahead_before is None:
            return
        for tensor in tensors_in(values):
            number = storage_id(local(tensor))
            if number in self._ahead and number not in self._ahead_before:  # else it may be a constant
                name, _ = self._ahead[number]
                raise UsageError(
                    f"{name} holds a batch that came from the iterator beside it before its step. When a "
                    f"step is repeated, the batch is put back and the iterator is not. {_REMEDY}",
                    alike=True,
                )

    def _begins_anew(self, iteration: int, digest: BatchDigest) -> bool:
        """Whether the script has begun to iterate over its data once more, in a replacement.

        There is nothing to compare with if the lost worker never came to this iteration. But it is no
        coincidence if a script that ignores the step's index begins with the first batch of all.
        """
        first = self._board.first
        if first is None or not first.varies or iteration <= first.iteration:
            return False
        # By index, it is the first one of another epoch, unless there is an iterator that might give it.
        return digest.value == first.digest and (not self._index_read or bool(self._iterators()))

    def _warn_of_iterators(self) -> None:
        """In the first steps of a run, not first when a machine is lost."""
        first = self._board.first
        if self._looked_for_iterators or first is None or not first.varies:
            return
        self._looked_for_iterators = True
        if names := [*self._iterators(), *self._further_iterators()]:
            _logger.warning(
                "%s an iterator (%s): it goes on when a step is repeated after a loss, and begins anew in a "
                "replacement. %s",
                "batches may come from" if self._index_read else "the batches come from",
                ", ".join(names),
                _REMEDY,
                extra={"event": "batches_of_iterator", "names": names},
            )

    def _warn_of_resumption(self, iteration: int) -> None:
        """A resumed run has no digests of the earlier one: if its script may ignore the index, say so.

        Raises:
            ChangedBatchError: an iterator has begun with the first batch again.
        """
        if not (self._fresh and iteration > 0 and self._board.first is None):
            return
        names = self._iterators()
        if self._index_read and not names:
            return
        if not self._has_position and not self._index_read and names:
            raise ChangedBatchError(
                f"Training continues in iteration {iteration}, and the batches come from an iterator "
                f"({', '.join(names)}), which begins with the first one. {_REMEDY}",
                iteration=iteration,
                alike=True,
            )
        _logger.warning(
            "Training continues in iteration %d, and the script %s: unless its position in the data is a "
            "part of Session(state), it begins with its first batch again",
            iteration,
            f"has an iterator ({', '.join(names)})" if self._index_read else "has not asked for step.index",
            extra={"event": "batch_position_unknown", "iteration": iteration},
        )

    def _publish_arrived(self, *, wait: bool = False) -> None:
        while self._on_device and (wait or self._on_device[0][1].ready):
            iteration, digest = self._on_device.pop(0)
            value = digest.value
            # Only now: what was there before an abort is right, and so is all of a complete iteration.
            if digest.settled or iteration != self._begun or not self._in_doubt():
                self._board.publish(iteration, value, shares_at(self._changes, iteration))
            else:  # those after it would be taken for it
                self._on_device = [one for one in self._on_device if one[0] != iteration]


@dataclass(slots=True)
class FirstBatch:
    """The first batch that a rank was given, as far as it is known.

    Attributes:
        iteration: it was given for.
        varies: a later batch was another one.
    """

    iteration: int
    digest: str
    varies: bool = False


class BatchBoard:
    """Publishes the digests of one worker's batches in the rendezvous store.

    Args:
        rendezvous: a client of the rendezvous store.
        writer: writes to that store.
        rank: the worker.
        joined: an earlier worker of this rank may have published some.
    """

    def __init__(
        self, rendezvous: RendezvousStore, writer: BackgroundWriter, rank: int, *, joined: bool
    ) -> None:
        self._rendezvous = rendezvous
        self._writer = writer
        self._joined = joined
        self._rank = rank
        self._chunks: dict[int, dict[str, tuple[str, ...]]] = {}
        last = self._read(store_keys.last_batches(rank))  # the earlier worker has published none after it
        self._last_read = last["chunk"] if last is not None else -1
        self._last_written = self._last_read
        known = self._read(store_keys.first_batch(rank))
        self._first = FirstBatch(**known) if known is not None else None

    @property
    def first(self) -> FirstBatch | None:
        """The first batch of this rank; None if there was none."""
        return self._first

    def of(self, iteration: int, shares: Sequence[int] = ()) -> Sequence[str]:
        """The digests of an iteration's batches, in the order in which they were given.

        Args:
            iteration: that is repeated, perhaps.
            shares: of the replicas in it; empty if they are those of the beginning.
        """
        return self._chunk(iteration).get(_name(iteration, shares), ())

    def publish(self, iteration: int, digest: str, shares: Sequence[int] = ()) -> None:
        """Add the digest of a batch. Returns at once."""
        chunk, name = self._chunk(iteration), _name(iteration, shares)
        chunk[name] = (*chunk.get(name, ()), digest)
        if iteration // _CHUNK > self._last_written:
            self._last_written = iteration // _CHUNK
            # Before the chunk itself.
            self._write(store_keys.last_batches(self._rank), {"chunk": self._last_written})
        self._write(store_keys.batches(self._rank, iteration // _CHUNK), chunk.copy())
        if self._first is None:
            self._first = FirstBatch(iteration, digest)
        elif digest == self._first.digest or self._first.varies:
            return
        else:
            self._first.varies = True
        self._write(store_keys.first_batch(self._rank), asdict(self._first))

    def drop_before(self, iteration: int) -> None:
        """Forget the batches of iterations that will not be repeated."""
        for number in [n for n in self._chunks if (n + 1) * _CHUNK <= iteration]:
            del self._chunks[number]
            self._writer.delete(store_keys.batches(self._rank, number))

    def _chunk(self, iteration: int) -> dict[str, tuple[str, ...]]:
        number = iteration // _CHUNK
        if number not in self._chunks:
            known = self._read(store_keys.batches(self._rank, number)) if number <= self._last_read else None
            self._chunks[number] = {name: tuple(digests) for name, digests in (known or {}).items()}
        return self._chunks[number]

    def _read(self, key: str) -> dict[str, Any] | None:
        """The facts that an earlier worker of this rank has published; None if there are none."""
        if not self._joined or not self._rendezvous.check([key]):
            return None
        found: dict[str, Any] = json.loads(self._rendezvous.get(key))
        return found

    def _write(self, key: str, value: Mapping[str, Any]) -> None:
        self._writer.set_json(key, value)


def _name(iteration: int, shares: Sequence[int]) -> str:
    return f"{iteration}:{','.join(map(str, shares))}" if shares else str(iteration)
