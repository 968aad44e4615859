"""Checks that a repeated iteration gets the batch that it had before.

After a loss an iteration is repeated, or replayed. A script that takes its batches from an iterator gives it
the next one instead: nothing fails, and the weights are not those of an undisturbed run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from swift_ft.data.shares import Change, shares_at
from swift_ft.errors import ChangedBatchError
from swift_ft.runtime.data.board import BatchBoard
from swift_ft.runtime.data.digest import BatchDigest

_logger = logging.getLogger(__name__)

_REMEDY = (
    "Look batches up by step.index, as in `x, y = batches[step.index]`: swift_ft.data.IndexedBatches makes "
    "that of a Dataset. What is random in a batch may depend on step.index only. "
    "Session(check_data=False) switches this check off."
)


class BatchCheck:
    """Compares what the script gives to the schedule, or to the DDP model, with what it gave before.

    Args:
        board: remembers digests, those of an earlier worker of this rank included.
        enabled: False to do nothing.
        keep: iterations before the last committed checkpoint that may still be repeated.
    """

    def __init__(self, board: BatchBoard, *, enabled: bool, keep: int) -> None:
        # Owner of all fields: the training thread.
        self.enabled = enabled
        self._board = board
        self._keep = keep
        self._iteration: int | None = None  # None outside of `with step:`
        self._given = 0  # in this step
        self._index_read = False
        self._changes: Sequence[Change] = ()
        self._fresh = True  # this process has been given no batch yet
        self._on_device: list[tuple[int, BatchDigest]] = []  # that a GPU computes, by iteration

    def follow(self, changes: Sequence[Change]) -> None:
        """Batches are dealt otherwise from some iterations on: what was given for these before was other."""
        self._changes = changes

    def begin(self, iteration: int, committed: int) -> None:
        """The step of an iteration begins; the last committed checkpoint is of the other one."""
        self._iteration, self._given, self._index_read = iteration, 0, False
        self._publish_arrived()
        self._board.drop_before(committed - self._keep)

    def index_read(self) -> None:
        """The script has asked for the step's index."""
        self._index_read = True

    def end(self) -> None:
        """The body of the step has ended: what models are given now is the script's own business."""
        self._iteration = None

    def interrupted(self) -> None:
        """The step was interrupted: it will be repeated."""
        self.end()
        self._publish_arrived(wait=True)

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
        self._fresh = False

    def _begins_anew(self, iteration: int, digest: BatchDigest) -> bool:
        """Whether the script has begun to iterate over its data once more, in a replacement.

        There is nothing to compare with if the lost worker never came to this iteration. But it is no
        coincidence if a script that ignores the step's index begins with the first batch of all.
        """
        first = self._board.first
        if first is None or not first.varies or iteration <= first.iteration or self._index_read:
            return False
        return digest.value == first.digest

    def _warn_of_resumption(self, iteration: int) -> None:
        """A resumed run has no digests of the earlier one: if its script ignores the index, say so."""
        if self._fresh and iteration > 0 and self._board.first is None and not self._index_read:
            _logger.warning(
                "Training continues in iteration %d, and the script has not asked for step.index: unless its "
                "position in the data is a part of Session(state), it begins with its first batch again",
                iteration,
                extra={"event": "batch_position_unknown", "iteration": iteration},
            )

    def _publish_arrived(self, *, wait: bool = False) -> None:
        while self._on_device and (wait or self._on_device[0][1].ready):
            iteration, digest = self._on_device.pop(0)
            self._board.publish(iteration, digest.value, shares_at(self._changes, iteration))
