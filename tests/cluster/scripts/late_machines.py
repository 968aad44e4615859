"""``swift-run`` whose machines come for lost ones only once ``LOST`` losses have made the job smaller.

They come while all train, one after the other, until there are as many as before the losses. The file ``go``
ends the wait of ``slow_until_told.py``, once the job has its full size.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from swift_ft.cli import run
from swift_ft.coordination.follower import Follower
from swift_ft.launch.cluster import Cluster
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.regrowth import growth_of

GO = Path(os.environ["SWIFT_TEST_FOLDER"]) / "go"
LOST = int(os.environ["LOST"])
LOOKS_S = 0.2


class LateCluster(Cluster):
    """A cluster on this host."""

    came = 0

    def _next_end(self) -> tuple[int, int]:
        while not GO.exists():
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                return pid, status
            self._look()
            time.sleep(LOOKS_S)
        return super()._next_end()

    def _look(self) -> None:
        state = Follower(self._journal()).state
        membership = state.membership
        if state.phase != Phase.LIVE or state.worlds.present.number < LOST:
            return
        if state.worlds.full is None:
            GO.touch()
            return
        have_come = membership.arrivals >= self._job.opened.machines + self.came and growth_of(state) is None
        if have_come and self.came < LOST and state.worlds.change is None:
            self._start_machine(None, self._job.opened.machines + self.came)
            self.came += 1


if __name__ == "__main__":
    vars(run)["Cluster"] = LateCluster
    run.run_and_exit()
