"""Values that a script sets before its first step, and sets otherwise when a replacement runs it later.

A script that looks for checkpoints of its own finds none when a run begins, and one in the place of a lost
worker (``start_iter = 30``). So do those that number their output folders, or name them after the time. The
first process of each worker notes what its script has set. A replacement that is given the training's state
goes on with those values that were the same on another machine: they are the training's, too. Others may be a
machine's own (its name, a port, a path), and stay as they are; a line names them. So do all in the place of
another device of its host, as a guest has it.

A spare that audits a worker, or an offline replay, is given the same where its job still lives.

Where no state is there to go on with, all begin again as their scripts do now. Another world with other
numbers of workers has values of its own.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from swift_ft.checkpoint.step.carried import CarriedVariables
from swift_ft.checkpoint.step.places import Place, Saved, in_words, place_of_key
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)

_MOST, _MOST_BYTES = 1_000, 2**15
"""Variables that a worker notes, and bytes of their values: the rendezvous store is in a machine's memory."""


@dataclass(frozen=True)
class _Note:
    """Values that a script had set.

    Attributes:
        digests: of each value, by variable.
        whole: a digest of all of them.
        values: the small ones themselves, packed, in base64.
        place: what a process is among all, and on its host: its values follow from that.
    """

    digests: Mapping[str, int]
    whole: int
    values: str
    place: Sequence[int]


class StartValues:
    """Compares the values that this process begins with and those of the worker's first one.

    Args:
        context: this worker.
        carried: the script's variables, once the session has started.
        run_keys: where workers note theirs, for all worlds.
        writer: notes this worker's.
    """

    def __init__(
        self,
        context: WorkerContext,
        carried: CarriedVariables,
        run_keys: RendezvousStore,
        writer: BackgroundWriter,
    ) -> None:
        self._context = context
        self._carried = carried
        self._run_keys = run_keys
        self._writer = writer
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._place = [context.world_size, context.workers_per_machine, local_rank]

    def agree(self) -> None:
        """Note the values, in the first process of this worker; in a later one go on with those noted."""
        offline = self._context.offline is not None
        here = self._carried.at_start(_MOST)
        noted = self._noted(self._context.rank) if offline or self._context.started_in > 1 else None
        if noted is None:
            self._writer.do(partial(self._note, here))
        elif [*noted.place[:2]] == self._place[:2]:
            self._go_on_with(noted, here)

    def step_begins(self) -> None:
        """If no state has arrived, all have begun again with what their scripts have set now."""
        if self._carried.began_anew:
            self._carried.began_anew = False
            self._writer.do(partial(self._note, self._carried.at_start(_MOST)))

    def _note(self, here: Saved) -> None:
        """In the writer's thread."""
        carried = self._carried
        values = carried.packed(here, _MOST_BYTES)
        note = _Note(carried.digests_of(here), carried.digest(here), values, self._place)
        self._run_keys.set(store_keys.start_values(self._context.rank), json.dumps(asdict(note)))

    def _noted(self, rank: int) -> _Note | None:
        key = store_keys.start_values(rank)
        if not self._run_keys.check([key]):
            return None
        return _Note(**json.loads(self._run_keys.get(key)))

    def _go_on_with(self, noted: _Note, here: Saved) -> None:
        if self._carried.digest(here) == noted.whole:  # one of each takes long, while others may wait
            return
        ours = self._carried.digests_of(here)
        unlike = [key for key, digest in noted.digests.items() if ours.get(key, digest) != digest]
        known = self._carried.unpacked(noted.values)
        elsewhere = self._noted_on_another_machine() if [*noted.place] == self._place else {}
        given: dict[Place, Any] = {}
        own: list[Place] = []
        for key in unlike:
            path, name = place = place_of_key(key)
            if name in known.get(path, ()) and elsewhere.get(key) == noted.digests[key]:
                given[place] = known[path][name]
            else:
                own.append(place)
        self._carried.begin_with(given)
        if own:
            names = [in_words(place) for place in sorted(own)]
            _logger.warning(
                "this script has set %s before its first step otherwise than that of the worker whose place "
                "it takes: right for names, paths and times of a machine, wrong for what training depends on",
                shortened(names),
                extra={"event": "start_values_unlike", "variables": names},
            )

    def _noted_on_another_machine(self) -> Mapping[str, int]:
        """Digests by the worker at the same place of the next machine; none if there is no other one."""
        context = self._context
        other = (context.rank + context.workers_per_machine) % context.world_size
        noted = self._noted(other) if other != context.rank else None
        return noted.digests if noted is not None else {}
