"""Changes of modules' attributes that a hook between two steps has made, as a counter in ``forward()`` does.

They are not the training state that a hook must not change, and last in an undisturbed run. A replay calls no
hook, so that each worker notes its own for the one that may replay in its place. To compare all attributes
takes milliseconds, and many hooks only read a clock: of those that have changed nothing only plain values are
compared from then on.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import nn

from swift_ft.checkpoint.step.kinds import FIXED_EXACTLY
from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)

_MOST_BYTES = 2**16
"""Of what a worker notes for one hook: the rendezvous store is in a machine's memory."""

_Values = Mapping[str, Mapping[str, Any]]


class Carried(Protocol):
    """See :class:`swift_ft.checkpoint.step.carried.CarriedVariables`."""

    def in_modules(self) -> _Values:
        """Values that modules have, and had not at the start."""

    def changes_since(self, before: _Values, now: _Values) -> _Values:
        """The difference of two of them."""

    def packed(self, saved: _Values, most_bytes: int) -> str:
        """As text, without what does not fit."""

    def unpacked(self, text: str) -> _Values:
        """The inverse."""

    def put(self, saved: _Values) -> None:
        """Put it in place."""


class ModuleChanges:
    """Notes what hooks change in modules, and has it put in place in a replay.

    Args:
        rank: this worker.
        carried: the variables of its script.
        rendezvous: where a replay reads them.
        writer: notes them there.
        modules: all of the state's.
        keep: iterations whose notes a replay may ask for.
    """

    def __init__(
        self,
        rank: int,
        carried: Carried,
        rendezvous: RendezvousStore,
        writer: BackgroundWriter,
        modules: Callable[[], Iterable[nn.Module]],
        *,
        keep: int,
    ) -> None:
        self._rank = rank
        self._carried = carried
        self._rendezvous = rendezvous
        self._writer = writer
        self._modules = modules
        self._keep = keep
        self._written: deque[tuple[int, int]] = deque()
        self._before: _Values | None = None  # None where only the plain ones are compared
        self._plain_before: list[dict[str, Any]] = []
        self._change_nothing: set[str] = set()  # hooks that have not done so yet
        self._said: set[str] = set()

    def begin(self, name: str) -> None:
        """A hook is about to be called."""
        self._before = None if name in self._change_nothing else self._carried.in_modules()
        self._plain_before = self._plain()

    def note(self, name: str, iteration: int, position: int) -> None:
        """It has been called, after this many complete iterations; ``position`` counts those that are due."""
        changes: _Values = {}
        if self._before is not None:
            changes = self._carried.changes_since(self._before, self._carried.in_modules())
            if not changes:
                self._change_nothing.add(name)
        elif self._plain() != self._plain_before:  # for the first time: all is noted that steps have changed
            self._change_nothing.discard(name)
            changes = self._carried.changes_since({}, self._carried.in_modules())
        self._write(iteration, position, changes)

    def note_skipped(self, iteration: int, position: int) -> None:
        """It is not called again after a loss: what was noted before that does not hold."""
        self._write(iteration, position, {})

    def _plain(self) -> list[dict[str, Any]]:
        """Attributes of modules that never change in themselves, such as counters."""
        return [
            {name: value for name, value in vars(module).items() if type(value) in FIXED_EXACTLY}
            for module in self._modules()
        ]

    def _write(self, iteration: int, position: int, changes: _Values) -> None:
        while self._written and self._written[0][0] < iteration - self._keep:
            self._writer.delete(store_keys.between_changes(*self._written.popleft(), self._rank))
        self._written.append((iteration, position))
        key = store_keys.between_changes(iteration, position, self._rank)
        if not changes:
            self._writer.set(key, "")
            return
        packed = self._carried.packed(changes, _MOST_BYTES)
        kept = self._carried.unpacked(packed)
        all_of_them = ((path, name) for path, values in changes.items() for name in values)
        left = [f"{path}.{name}" for path, name in all_of_them if name not in kept.get(path, ())]
        self._writer.set(key, json.dumps([packed, left]))

    def put(self, name: str, iteration: int, position: int) -> None:
        """In a replay, put in place what a hook changed when it was called."""
        key = store_keys.between_changes(iteration, position, self._rank)
        if not self._rendezvous.check([key]):
            self._say(name, "there is no note of what it changed in modules, if it did, such as a counter")
            return
        if not (note := self._rendezvous.get(key).decode()):
            return
        packed, left = json.loads(note)
        self._carried.put(self._carried.unpacked(packed))
        if left:
            self._say(name, f"what it changed in {shortened(left)} was too large to be noted")

    def _say(self, name: str, what: str) -> None:
        if name not in self._said:
            self._said.add(name)
            _logger.warning(
                "%s() is done between two steps, and no replay calls it: %s, so here it is as before. Let "
                "only steps change it (`if self.training`), or `then`",
                name,
                what,
                extra={"event": "changes_between_steps_lost"},
            )
