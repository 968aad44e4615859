"""What a journal says about where checkpoints were read."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.load_timeline import checkpoint_loads


def test_loads_by_generation() -> None:
    events: list[ev.Event] = [
        ev.WorkerReady(rank=0, generation=1, loaded_own=10),
        ev.WorkerReady(rank=1, generation=1, loaded_peers=4, loaded_store=5),
        ev.WorkerReady(rank=0, generation=2, replayed=3),
        ev.WorkerReady(rank=1, generation=3, loaded_store=7),
    ]
    loads = checkpoint_loads([Entry(i, event, at=float(i), by="test") for i, event in enumerate(events)])
    assert [load.to_dict() for load in loads] == [
        {"generation": 1, "own_disk": {0: 10, 1: 0}, "peers": {0: 0, 1: 4}, "store": {0: 0, 1: 5}},
        {"generation": 3, "own_disk": {1: 0}, "peers": {1: 0}, "store": {1: 7}},
    ]
