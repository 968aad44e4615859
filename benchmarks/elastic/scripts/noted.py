"""An example training that notes when each worker has completed each iteration, and its CPU time until then.

noted.py FOLDER EXAMPLE, and the arguments of the example
"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import swift_ft
from benchmarks.peers.scripts.work import Trace

folder, example, *arguments = sys.argv[1:]
sys.argv = [f"{example}.py", *arguments]


class Session(swift_ft.Session):
    """With notes between the steps."""

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        """The usual ones."""
        trace = Trace(Path(folder), int(os.environ["RANK"]))
        for step in super().steps(iterations):
            yield step
            trace.end(step.index)


swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(example).main()
