"""Changes of modules' attributes that a hook between two steps has made, as a counter in ``forward()`` does.

They are not the training state that a hook must not change, and last in an undisturbed run. A replay calls no
hook, so that each worker notes its own for the one that may replay in its place. To compare all attributes
takes milliseconds, and many hooks only read a clock: it is done for those that call modules.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_core.module_hooks import OwnHook
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
        keep: iterations whose notes a replay may ask for.
    """

    def __init__(
        self,
        rank: int,
        carried: Carried,
        rendezvous: RendezvousStore,
        writer: BackgroundWriter,
        *,
        keep: int,
    ) -> None:
        self._rank = rank
        self._carried = carried
        self._rendezvous = rendezvous
        self._writer = writer
        self._keep = keep
        self._written: deque[tuple[int, int]] = deque()
        self._before: _Values = {}
        self._called: RemovableHandle | None = None  # while a hook runs that has called no module yet
        self._call_modules: set[str] = set()  # hooks that have done so
        self._said: set[str] = set()

    def begin(self, name: str) -> None:
        """A hook is about to be called."""
        self._is_called()  # the one before may have raised
        self._before = self._carried.in_modules() if name in self._call_modules else {}
        self._called = register_module_forward_pre_hook(OwnHook(self._is_called))

    def note(self, name: str, iteration: int, position: int) -> None:
        """It has been called, after this many complete iterations; ``position`` counts those that are due."""
        if self._called is not None:
            self._is_called()
            self._write(iteration, position, {})
        else:  # where that is new, all values are noted that are not those of the start
            self._call_modules.add(name)
            changes = self._carried.changes_since(self._before, self._carried.in_modules())
            self._write(iteration, position, changes)
        self._before = {}

    def note_skipped(self, iteration: int, position: int) -> None:
        """It is not called again after a loss: what was noted before that does not hold."""
        self._write(iteration, position, {})

    def _is_called(self, *_: object) -> None:
        if self._called is not None:
            self._called.remove()
            self._called = None

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
