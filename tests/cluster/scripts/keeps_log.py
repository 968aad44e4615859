"""An example training (EXAMPLE, a module) that keeps the logs of all its checkpoints.

Each worker writes its parameters down before each step, once: a test compares a replay with them. SESSION has
other arguments of the session, as JSON.
"""

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import swift_ft

FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
SETTINGS = json.loads(os.environ["SESSION"])


class Session(swift_ft.Session):
    def __init__(self, state: Any, **arguments: Any) -> None:
        super().__init__(state, **{**arguments, "keep_logs": "all", **SETTINGS})
        self.model = state["model"]

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            path = FOLDER / f"{step.index}-rank{os.environ['RANK']}.pt"
            if not path.exists():
                torch.save(self.model.state_dict(), path)
            yield step


swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(os.environ["EXAMPLE"]).main()
