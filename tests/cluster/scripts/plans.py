"""An example training (EXAMPLE, a module) whose worker 0 asks for plans: before the first step, and later.

Each is written down as JSON, and printed.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import swift_ft

FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
LATER = 10
settings = json.loads(os.environ["SESSION"])


class Session(swift_ft.Session):
    def __init__(self, state: Any, **arguments: Any) -> None:
        super().__init__(state, **{**arguments, **settings})

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        self.write("before")
        for step in super().steps(iterations):
            if step.index == LATER:
                self.write("later")
            yield step

    def write(self, name: str) -> None:
        path = FOLDER / f"{name}.json"
        if os.environ["RANK"] == "0" and not path.exists():
            plan = self.plan()
            path.write_text(json.dumps(plan.to_dict()))
            print(plan, flush=True)


swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(os.environ["EXAMPLE"]).main()
