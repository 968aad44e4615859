"""The example training, in which worker 1's first replay costs the machine of worker 2 its life."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import train_swift

import swift_ft

RANK = int(os.environ["RANK"])
PIDS = Path(os.environ["SWIFT_TEST_FOLDER"]) / f"pids{RANK}"
VICTIM = PIDS.with_name("pids2")


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if RANK == 1 and step.replayed and step.index == 4 and VICTIM.exists():
                pids = VICTIM.read_text().split()
                VICTIM.unlink()  # once
                for pid in pids:
                    os.kill(int(pid), signal.SIGKILL)
            yield step


if os.environ["SWIFT_LAUNCHED"] == "1":
    PIDS.write_text(f"{os.environ['SWIFT_AGENT_PID']} {os.getpid()}")
swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
