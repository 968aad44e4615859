"""``swift-run`` where the relay of machine 2 passes each block of the journal on half a second late."""

import os
import time
from pathlib import Path

from swift_ft.cli.run import run_and_exit
from swift_ft.coordination.relay.relay import Relay

SLOW, LATE_S = 2, 0.5
SEEN = Path(os.environ["SWIFT_TEST_FOLDER"]) / "late"

push = Relay._push


def push_late(self: Relay, number: int, text: str) -> None:
    if self._state.slot_of(self._machine) == SLOW:
        followers = sum(bool(subscriber.machine) for subscriber in self._subscribers)
        time.sleep(LATE_S)
        with SEEN.open("a") as file:
            file.write(f"{number} {followers}\n")
    push(self, number, text)


if __name__ == "__main__":
    Relay._push = push_late
    run_and_exit()
