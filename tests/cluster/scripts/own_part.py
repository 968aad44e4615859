"""An example training with a part of its own: a ledger of its steps, kept right through losses."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path

from ledger import Ledger

import swift_ft
from swift_ft.config.worker_context import WorkerContext


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        folder, rank = Path(os.environ["SWIFT_TEST_FOLDER"]), WorkerContext.from_env().rank
        self.attach_part(Ledger(folder / f"ledger-{rank}.txt"))
        return super().steps(iterations)


swift_ft.Session = Session  # type: ignore[misc]
runpy.run_module("train_swift", run_name="__main__")
