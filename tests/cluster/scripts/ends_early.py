"""The example training, in which some worker ends before the others.

ENDS says as JSON how: ``{"by": [ranks], "iteration": n, "how": "exit" | "steps" |
"edit"}``. The last one edits this very script, and goes on.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import train_swift

import swift_ft

RANK = int(os.environ["RANK"])
ENDS = json.loads(os.environ["ENDS"])


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        acts = RANK in ENDS["by"]
        if acts and ENDS["how"] == "steps":
            iterations = ENDS["iteration"]
        for step in super().steps(iterations):
            if acts and step.index == ENDS["iteration"]:
                if ENDS["how"] == "exit":
                    sys.exit(0)
                script = Path(sys.argv[0])
                script.write_text(f"raise SystemExit('edited while it runs')\n{script.read_text()}")
            yield step


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
