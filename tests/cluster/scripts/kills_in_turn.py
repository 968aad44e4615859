"""An example training. Machines are killed one after the other, each when all survivors have reported.

KILLS says as JSON which, in which step that begins, and the example: ``{"victims": [ranks], "iteration": n,
"example": "train_swift"}``. Worker 0 kills them in a thread of its own, while its training thread recovers.
The checkpoint before that step is committed by then, however slow the disk is. New machines wait until all
are killed, so that no plan is made before.
"""

import json
import os
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from swift_ft.recovery.job_state import State
from tests.support.commits import wait_for_commit
from tests.support.machines import kill_once, note_machine
from tests.support.waiting import wait_until

CONTEXT = WorkerContext.from_env()
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
KILLS = json.loads(os.environ["KILLS"])
VICTIMS: list[int] = KILLS["victims"]
ALL_KILLED = FOLDER / "all-killed"
DEADLINE_S = 60.0


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if CONTEXT.rank == 0 and step.index == KILLS["iteration"] and not ALL_KILLED.exists():
                wait_for_commit(self, step.index)
                threading.Thread(target=self.kill_in_turn, daemon=True).start()
            yield step

    def kill_in_turn(self) -> None:
        participant = self._assembly._participant
        survivors = {*range(CONTEXT.world_size)} - {*VICTIMS}
        for victim in VICTIMS:
            machine = participant.state.membership.members[victim]
            kill_once(victim)

            def is_known(state: State, machine: str = machine) -> bool:
                reports = state.round.statuses.keys() if not state.round.decided else ()
                return machine in state.membership.fenced and survivors <= {*reports}

            if participant.wait_for(is_known, DEADLINE_S) is None:
                raise TimeoutError(f"{machine} is not lost, or not all survivors have reported")
        ALL_KILLED.touch()


if CONTEXT.started_in == 1:
    note_machine()
else:
    wait_until(ALL_KILLED.exists, "not all machines were killed")
swift_ft.Session = Session  # type: ignore[misc]
runpy.run_module(KILLS["example"], run_name="__main__")
