"""``swift-run`` where a snapshot of the journal is written every few events, and not every thousand."""

from swift_ft.cli.run import run_and_exit
from swift_ft.coordination import compaction
from swift_ft.coordination.compaction import Compactor

EVERY = 8

if __name__ == "__main__":
    vars(compaction)["_EVENTS_PER_WORKER"] = 1
    _, *others = Compactor.__init__.__defaults__ or ()
    Compactor.__init__.__defaults__ = (EVERY, *others)
    run_and_exit()
