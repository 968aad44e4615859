"""An example training whose store another run claims before iteration 5, as a second ``--resume`` would."""

import runpy
from collections.abc import Iterator

import swift_ft
from swift_ft.checkpoint.run_record import read_record, write_record
from swift_ft.config.worker_context import WorkerContext
from tests.support.commits import wait_for_commit

CLAIMED_IN = 5


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if WorkerContext.from_env().rank == 0 and step.index == CLAIMED_IN:
                wait_for_commit(self, step.index)
                store = self._assembly._store
                record = read_record(store)
                assert record is not None
                earlier = [*record["earlier"], record["run_id"]]
                write_record(store, {**record, "run_id": "another", "earlier": earlier})
            yield step


swift_ft.Session = Session  # type: ignore[misc]
runpy.run_module("train_swift", run_name="__main__")
