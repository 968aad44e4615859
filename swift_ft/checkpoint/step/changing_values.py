"""Tensors and arrays of a script that were seen to change in place: these are copied, however large.

Each step copies what is small. To copy all that is large as well would take too long, and most of it never
changes. So only a change of it is seen at first, and from then on notes have copies of what has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.kinds import CONTAINERS, GENERATORS, MOST_ELEMENTS, OF_BYTES
from swift_ft.checkpoint.step.leaves import FEW_BYTES, MOST_NOTED, Leaves, Uncopied
from swift_ft.checkpoint.step.protected import ProtectedValues

_FIRST_NOTES = 3
_DEEPEST = 3
"""Containers in a container of many elements."""


class ChangingValues:
    """Those that are known to change, and the copies that notes have of them.

    Args:
        protected: what the state has copies of.
    """

    def __init__(self, protected: ProtectedValues) -> None:
        self._protected = protected
        self._notes = 0
        self._beyond: list[Uncopied] = []  # of the last note
        self._changing: dict[int, weakref.ref[Any]] = {}  # those that have changed, by id()

    def add(self, values: Iterable[torch.Tensor | np.ndarray[Any, Any]]) -> None:
        """They were seen to change in place: notes that may copy them do so from now on."""
        self._changing.update((id(value), weakref.ref(value)) for value in values)

    def new_leaves(self, *, whole: bool, large: bool) -> Leaves:
        """The copies of a note, which has none yet.

        In the first notes all is copied, to see what changes: where there is much, only that later on.

        Args:
            whole: copy as well what has never changed, however much there is.
            large: copy containers of any number of elements, too.
        """
        self._notes += 1
        # Not by callbacks: an exception of the script's signal handler would be lost in one.
        self._changing = {number: one for number, one in self._changing.items() if one() is not None}
        changed = (one.value() for one in self._beyond if one.changed)
        self.add(value for value in changed if value is not None)
        known = None if whole or self._notes <= _FIRST_NOTES else self._changing
        return Leaves(known, any_length=large, has_copy=self._protected.has_copy_of)

    def copy_large(self, values: Sequence[Any], reached: Iterable[Any], leaves: Leaves) -> None:
        """Copy what is too large for a copy in each step, or note it so that a change is seen.

        Args:
            values: that a step can reach.
            reached: other things, of which only the content of containers counts.
            leaves: the note's copies so far.
        """
        containers = [one for one in (*reached, *values) if isinstance(one, CONTAINERS)]
        inner = [one for container in containers if len(container) > MOST_ELEMENTS for one in _in(container)]
        leaves.add_all(inner, FEW_BYTES)
        for value in (*values, *inner):
            leaves.add_large(value, self._changing)

    def noted(self, leaves: Leaves) -> None:
        """The note has these copies: the next one sees what has changed without one."""
        self._beyond = leaves.beyond


def _in(container: Any, depth: int = 0) -> Iterator[Any]:
    """Values that change in place in a container that is not looked into: those in objects are left out."""
    if isinstance(container, OF_BYTES) or len(container) > MOST_NOTED:
        return
    for one in container if isinstance(container, tuple) else content_in(container):
        if isinstance(one, (tuple, *CONTAINERS)):
            if not isinstance(one, tuple):
                yield one
            if depth < _DEEPEST:
                yield from _in(one, depth + 1)
        elif isinstance(one, (torch.Tensor, np.ndarray, *GENERATORS)):
            yield one
