"""The example training, in which worker 1 is replaced and something disturbs its replay (PEERS).

unusable   worker 0's server is gone, and its log reaches the store only after a first search in vain; the
           server of worker 2 sends each segment with a flipped bit
dies       nothing of worker 2's log gets into the store, and its machine dies at the first request for it
offline    the replay waits for the end of the store (the file `down`), which is back when training continues
           (`over`). Machines 1 and 2 are a group, and nothing is shipped before the failure
"""

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import train_swift

import swift_ft
from swift_ft.logging import PeerLog, SegmentSource, SegmentUploader
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from tests.support.machines import is_first_process, kill_once, note_machine
from tests.support.waiting import wait_until

HOW = os.environ["PEERS"]
RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
REQUESTED = FOLDER / "requested"


def refuse_uploads_until(requested: Path | None) -> None:
    ship = SegmentUploader._upload

    def refuse(self: SegmentUploader, path: str) -> None:
        if requested is None or not requested.exists():
            raise OSError("nothing of this log gets into the store")
        ship(self, path)

    SegmentUploader._upload = refuse


def close_the_server() -> None:
    serve = WorkerLog._serve

    def serve_and_close(self: WorkerLog, tier: SegmentUploader) -> bool:
        offered = serve(self, tier)
        assert self._peers is not None
        assert self._peers._server is not None
        self._peers._server.close()
        return offered

    WorkerLog._serve = serve_and_close


def flip_bits() -> None:
    find = SegmentUploader.find

    def flipped(self: SegmentUploader, name: str) -> Path:
        data = bytearray(find(self, name).read_bytes())
        data[len(data) // 2] ^= 1
        copy = FOLDER / f"flipped-{name}"
        copy.write_bytes(data)
        return copy

    SegmentUploader.find = flipped


def before_worker_is_asked(asked: int, act: Callable[[], None]) -> None:
    of, open_ = WorkerLog._offer, PeerLog.open
    its = []

    def remember(self: WorkerLog, rank: int) -> SegmentSource | None:
        peer = of(self, rank)
        if rank == asked:
            its.append(peer)
        return peer

    def act_first(self: PeerLog, name: str) -> Any:
        if self in its:
            act()
        return open_(self, name)

    WorkerLog._offer, PeerLog.open = remember, act_first


def when_asked_again(count: Iterator[int]) -> None:
    """The second request: at the first one the segment was not in the store either."""
    if next(count) == 1:
        REQUESTED.touch()


class OfflineReplay(swift_ft.Session):
    def __init__(self, state: Any, **arguments: Any) -> None:
        super().__init__(state, **arguments, ship="on-failure", groups=[[0], [1, 2], [3]])

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if RANK == 1 and step.replayed and not (FOLDER / "asks").exists():
                (FOLDER / "asks").touch()
                wait_until((FOLDER / "down").exists, "the store was not stopped")
            if RANK == 1 and not is_first_process() and not step.replayed:
                (FOLDER / "over").touch()
            yield step


match HOW, RANK, is_first_process():
    case "unusable", 0, True:
        close_the_server()
        refuse_uploads_until(REQUESTED)
    case "unusable", 1, False:
        before_worker_is_asked(0, partial(when_asked_again, itertools.count()))
    case "unusable", 2, True:
        flip_bits()
    case "dies", 2, True:
        refuse_uploads_until(None)
        note_machine()
    case "dies", 1, False:
        before_worker_is_asked(2, partial(kill_once, 2))
    case "offline", _, _:
        swift_ft.Session = OfflineReplay  # type: ignore[misc]
train_swift.main()
