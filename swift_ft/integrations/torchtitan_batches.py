"""The batches of a step by its index, from torchtitan's loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class StepBatches:
    """The batches of a step by its index, from a loader that is read in order and has a state.

    Args:
        loader: torchtitan's.
        per_step: batches of a step: all microbatches, of all accumulations.
        reader: which of the data-parallel workers this one is; each has other samples.
    """

    def __init__(self, loader: Any, per_step: int, reader: int) -> None:
        self._loader = loader
        self._per_step = per_step
        self._reader = reader
        self._beginning = loader.state_dict()
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # the step whose batches the iterator gives next
        self._kept: dict[int, list[Any]] = {}  # of the last two steps

    def __getitem__(self, index: int) -> list[Any]:
        """The batches of a step; fewer than a step has where the data has ended."""
        if index not in self._kept:
            self._go_to(index)
            self._kept = {place: kept for place, kept in self._kept.items() if place == index - 1}
            self._kept[index] = self._take()
        # A step moves the tensors of a batch to its device, in the batch's own dictionary.
        return [({**inputs}, labels) for inputs, labels in self._kept[index]]

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader."""
        return {"next": self._next, "loader": self._loader.state_dict(), "reader": self._reader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there at once: torchtitan's own checkpoint may be saved before the next step."""
        if state["next"] in self._kept or state["next"] == self._next:
            return
        if state["reader"] == self._reader:
            self._begin(state["loader"], state["next"])
        else:  # a replica's, which has read other samples
            self._go_to(state["next"])

    def _begin(self, state: Any, index: int) -> None:
        self._loader.load_state_dict(state)
        self._iterator, self._next, self._kept = iter(self._loader), index, {}

    def _go_to(self, index: int) -> None:
        if self._iterator is None or index < self._next:
            self._begin(self._beginning, 0)
        while self._next < index:
            self._take()

    def _take(self) -> list[Any]:
        assert self._iterator is not None
        self._next += 1
        return [batch for _, batch in zip(range(self._per_step), self._iterator, strict=False)]
