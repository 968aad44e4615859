"""An example training (EXAMPLE, a module) whose worker 0 asks for plans: before the first step, and later.

Each is written to a file as JSON, and printed. With the later one comes what ``swift-recover plan`` says of
machine 1, from the store.
"""

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import swift_ft
from swift_ft.offline.archive import read_journal
from swift_ft.offline.loss import LossPlanner
from swift_ft.offline.run_store import RunStore, open_run_store
from tests.support.waiting import wait_until

FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
LATER = 10
settings = json.loads(os.environ["SESSION"])


def is_archived(run: RunStore) -> bool:
    """All that is written in the background is in the store: what was measured, and the last commit."""
    every = run.settings["checkpoint_every"]
    state = read_journal(run.store, run.run_id).last_state()
    due = LATER // every * every
    return state.checkpoints.committed == due and len(run.profiles()) == int(os.environ["WORLD_SIZE"])


class Session(swift_ft.Session):
    def __init__(self, state: Any, **arguments: Any) -> None:
        self.url = arguments["store"]
        super().__init__(state, **{**arguments, **settings})

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        self.write("before")
        for step in super().steps(iterations):
            if step.index == LATER:
                self.write("later")
                self.write_what_the_store_says()
            yield step

    def write(self, name: str) -> None:
        path = FOLDER / f"{name}.json"
        if os.environ["RANK"] == "0" and not path.exists():
            plan = self.plan()
            path.write_text(json.dumps(plan.to_dict()))
            print(plan, flush=True)

    def write_what_the_store_says(self) -> None:
        path = FOLDER / "from_store.json"
        if os.environ["RANK"] == "0" and not path.exists():
            run = open_run_store(self.url)
            wait_until(lambda: is_archived(run), "not all is archived")
            planner = LossPlanner(read_journal(run.store, run.run_id), run.profiles())
            loss = planner.plan([1], iteration=LATER + 1)
            path.write_text(json.dumps(loss.to_dict()))


swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(os.environ["EXAMPLE"]).main()
