"""After how many iterations there is a memory checkpoint: as the script says, or as what it costs suggests.

With ``"auto"``, worker 0 measures and decides once. A copy takes time of the training thread. Where the model
computes on the processor, as the threads that send and receive do, their processor time counts as well. Until
another worker knows, it may make a copy that no other one makes; that copy is never complete, and is dropped
as soon as the worker knows.
"""

from __future__ import annotations

import json
import math
import time

from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

AUTO = "auto"

_FIRST = 10
"""Iterations between copies until it is known what they cost."""
_MEASURED = 8
_SHARE = 0.015
"""Of the time of training that copies may take."""
_AHEAD = 2
"""Iterations from the decision to its first: most workers have learned of it by then."""


class Interval:
    """When copies are due. Owner of what is measured: the training thread.

    Args:
        rendezvous: where worker 0 says what it decided.
        writer: writes that there.
        every: iterations between two copies; :data:`AUTO` to choose that from what a copy costs.
        rank: this worker.
        at_most: iterations between two checkpoints in the store: more would be no use.
    """

    def __init__(
        self,
        rendezvous: RendezvousStore,
        writer: BackgroundWriter,
        every: int | str,
        *,
        rank: int,
        at_most: int,
    ) -> None:
        self._rendezvous = rendezvous
        self._writer = writer
        self._auto = every == AUTO
        self.every = min(_FIRST, at_most) if isinstance(every, str) else every
        self._rank = rank
        self._at_most = at_most
        self._decided: tuple[int, int] | None = None  # from which iteration, and how many
        self._copy_s = self._send_s = self._processor_s = 0.0
        self._steps_s: list[float] = []
        self._last: float | None = None

    def due(self, iteration: int) -> bool:
        """Whether a copy follows the completion of this many iterations."""
        if self._auto:
            self._measure(iteration)
        return iteration % self._after(iteration) == 0

    @property
    def now(self) -> int:
        """Iterations between two copies, as it was decided last."""
        return self.every if self._decided is None else self._decided[1]

    def never(self, iteration: int) -> bool:
        """Whether worker 0 makes no copy after an iteration, as far as is known here."""
        return iteration % self._after(iteration) != 0

    def copied(self, seconds: float) -> None:
        """A copy took this long, of training."""
        self._copy_s, self._last = seconds, None

    def sent(self, seconds: float, processor_s: float) -> None:
        """A copy was on its way for so long.

        Args:
            seconds: from the first byte to the last.
            processor_s: that sending took from the training; receiving takes about as much.
        """
        self._send_s, self._processor_s = seconds, 2 * processor_s

    def look(self) -> None:
        """Learn what worker 0 has decided. Not in the training thread."""
        if self._auto and self._decided is None and self._rendezvous.check([store_keys.memory_interval()]):
            since, every = json.loads(self._rendezvous.get(store_keys.memory_interval()))
            self._decided = (since, every)

    def _after(self, iteration: int) -> int:
        decided = self._decided
        return decided[1] if decided is not None and iteration >= decided[0] else self.every

    def _measure(self, iteration: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._steps_s.append(now - self._last)
        self._last = now
        if self._rank != 0 or self._decided or not self._send_s or len(self._steps_s) < _MEASURED:
            return
        step_s = sorted(self._steps_s)[len(self._steps_s) // 2]
        every = max((self._copy_s + self._processor_s) / (_SHARE * step_s), 2 * self._send_s / step_s)
        decided = (iteration + _AHEAD, min(self._at_most, max(1, math.ceil(every))))
        self._writer.set(store_keys.memory_interval(), json.dumps(decided))
        self._decided = decided
