"""``train_swift`` whose worker 1 takes all memory in an iteration of its first life, or of each (ALWAYS)."""

import importlib
import os
from collections.abc import Iterator

from takes_all_memory import take_all  # type: ignore[import-not-found]

import swift_ft

AT = 5


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        context = self._assembly._participant.context
        for step in super().steps(iterations):
            starves = context.started_in == 1 or os.environ["ALWAYS"] == "1"
            if context.rank == 1 and starves and step.index == AT and not step.replayed:
                take_all()
            yield step


swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module("train_swift").main()
