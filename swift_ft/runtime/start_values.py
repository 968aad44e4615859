"""Values that a script sets before its first step, and sets otherwise when a replacement runs it later.

A script that looks for checkpoints of its own finds none when a run begins, and one in the place of a lost
worker (``start_iter = 30``). So do those that number their output folders, or name them after the time. The
first process of each worker notes what its script has set. A replacement goes on with those values that
were the same on another machine: they are the training's. Others may be a machine's own (its name, a port, a
path), and stay as they are; a line names them.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from swift_ft.checkpoint.step.carried import CarriedVariables, Place, Saved, in_words, place_of_key
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)

_MOST_BYTES = 2**15
"""Of the values that a worker notes: the rendezvous store is in a machine's memory."""
_NAMED = 6


@dataclass(frozen=True)
class _Note:
    """Values that a script had set.

    Attributes:
        digests: of each value, by variable.
        values: the small ones themselves, packed, in base64.
    """

    digests: Mapping[str, int]
    values: str


class StartValues:
    """Compares the values that this process begins with and those of the worker's first one.

    Args:
        context: this worker.
        carried: the script's variables, once the session has started.
        rendezvous: where workers note theirs.
        writer: notes this worker's.
    """

    def __init__(
        self,
        context: WorkerContext,
        carried: CarriedVariables,
        rendezvous: RendezvousStore,
        writer: BackgroundWriter,
    ) -> None:
        self._context = context
        self._carried = carried
        self._rendezvous = rendezvous
        self._writer = writer

    def agree(self) -> None:
        """Note the values, in the first process of this worker; in a later one go on with those noted."""
        if self._context.offline is not None:
            return
        here = self._carried.at_start()
        noted = self._noted(self._context.rank) if self._context.started_in > 1 else None
        if noted is None:
            self._writer.do(partial(self._note, here))
        else:
            self._go_on_with(noted, here)

    def _note(self, here: Saved) -> None:
        """In the writer's thread."""
        values = base64.b64encode(self._carried.packed(here, _MOST_BYTES)).decode()
        note = _Note(self._carried.digests_of(here), values)
        self._rendezvous.set(store_keys.start_values(self._context.rank), json.dumps(asdict(note)))

    def _noted(self, rank: int) -> _Note | None:
        key = store_keys.start_values(rank)
        if not self._rendezvous.check([key]):
            return None
        return _Note(**json.loads(self._rendezvous.get(key)))

    def _go_on_with(self, noted: _Note, here: Saved) -> None:
        ours = self._carried.digests_of(here)
        unlike = [key for key, digest in noted.digests.items() if ours.get(key, digest) != digest]
        if not unlike:
            return
        known = self._carried.unpacked(base64.b64decode(noted.values))
        elsewhere = self._noted_on_another_machine()
        given: dict[str, dict[str, Any]] = {}
        own: list[Place] = []
        for key in unlike:
            path, name = place = place_of_key(key)
            if name in known.get(path, ()) and elsewhere.get(key) == noted.digests[key]:
                given.setdefault(path, {})[name] = known[path][name]
            else:
                own.append(place)
        self._carried.begin_with(given)
        self._say([(path, name) for path, values in given.items() for name in values], own)

    def _noted_on_another_machine(self) -> Mapping[str, int]:
        """Digests by the worker at the same place of the next machine; none if there is no other one."""
        context = self._context
        other = (context.rank + context.workers_per_machine) % context.world_size
        noted = self._noted(other) if other != context.rank else None
        return noted.digests if noted is not None else {}

    def _say(self, given: list[Place], own: list[Place]) -> None:
        if given:
            names = [in_words(place) for place in sorted(given)]
            _logger.info(
                "this script has set %s before its first step otherwise than when the run began: it goes on "
                "with the values of then, which were the same on another machine",
                shortened(names, _NAMED),
                extra={"event": "start_values_given", "variables": names},
            )
        if own:
            names = [in_words(place) for place in sorted(own)]
            _logger.warning(
                "this script has set %s before its first step otherwise than that of the worker whose place "
                "it takes: right for names, paths and times of a machine, wrong for what training depends on",
                shortened(names, _NAMED),
                extra={"event": "start_values_unlike", "variables": names},
            )
