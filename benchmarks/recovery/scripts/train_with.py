"""The example training with other arguments of the session (SESSION, as JSON).

With NOTES, a folder, each worker writes its metrics there after the first iterations, and worker 0 also the
session's plan. A line of ``steps<rank>.jsonl`` says when an iteration began, the last one when all were done.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import train_swift

import swift_ft

NOTED_AT = 12  # the profile is complete
settings = json.loads(os.environ["SESSION"])
notes = Path(os.environ["NOTES"]) if "NOTES" in os.environ else None


class Session(swift_ft.Session):
    """With the arguments of SESSION."""

    def __init__(self, state: Any, **arguments: Any) -> None:
        super().__init__(state, **{**arguments, **settings})

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        """The usual steps, with notes in between."""
        for step in super().steps(iterations):
            if notes is not None:
                self._note(notes, step.index, "replay" if step.replayed else "live")
                if step.index == NOTED_AT and not step.replayed:
                    self._write_notes(notes)
            yield step
        if notes is not None:
            self._note(notes, iterations, "finished")

    def _note(self, folder: Path, iteration: int, mode: str) -> None:
        rank = int(os.environ["RANK"])
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"rank": rank, "iteration": iteration, "mode": mode, "at": time.time()}
        with (folder / f"steps{rank}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def _write_notes(self, folder: Path) -> None:
        rank = int(os.environ["RANK"])
        plan = self.plan().to_dict() if rank == 0 else None
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"log": self.metrics().to_dict()["log"]["last"], "plan": plan})
        (folder / f"rank{rank}.json").write_text(text)


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
