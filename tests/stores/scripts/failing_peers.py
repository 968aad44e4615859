"""The example training, in which worker 1 is replaced and something befalls its replay (PEERS).

unusable   worker 0's server is gone, and the store gets its log only when it was looked for in vain; that of
           worker 2 gives each segment with a flipped bit
dies       nothing of worker 2's log gets into the store, and its machine dies when it is asked for its log
offline    the replay waits for the end of the store (the file `down`), which comes back when training goes on
           (`over`). Machines 1 and 2 are a group, and nothing is shipped before the failure
"""

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import train_swift

import swift_ft
from swift_ft.logging import Peer, Shipper
from swift_ft.recovery.log_peers import LogPeers

HOW = os.environ["PEERS"]
RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
ORIGINAL = os.environ["SWIFT_LAUNCHED"] == "1"
PIDS = FOLDER / "pids2"
WANTED = FOLDER / "wanted"


def refuse_uploads_until(wanted: Path | None) -> None:
    ship = Shipper._ship

    def refuse(self: Shipper, path: str) -> None:
        if wanted is None or not wanted.exists():
            raise OSError("nothing of this log gets into the store")
        ship(self, path)

    Shipper._ship = refuse


def close_the_server() -> None:
    offer = LogPeers.offer

    def offer_and_close(self: LogPeers, *arguments: Any) -> bool:
        offered = offer(self, *arguments)
        self._server.close()
        return offered

    LogPeers.offer = offer_and_close


def flip_bits() -> None:
    find = Shipper.find

    def flipped(self: Shipper, name: str) -> Path:
        data = bytearray(find(self, name).read_bytes())
        data[len(data) // 2] ^= 1
        copy = FOLDER / f"flipped-{name}"
        copy.write_bytes(data)
        return copy

    Shipper.find = flipped


def before_worker_is_asked(asked: int, act: Callable[[], None]) -> None:
    of, open_ = LogPeers.of, Peer.open
    its = []

    def remember(self: LogPeers, generation: int, rank: int) -> Peer | None:
        peer = of(self, generation, rank)
        if rank == asked:
            its.append(peer)
        return peer

    def act_first(self: Peer, name: str) -> Any:
        if self in its:
            act()
        return open_(self, name)

    LogPeers.of, Peer.open = remember, act_first


def kill_worker_2() -> None:
    if PIDS.exists():
        pids = PIDS.read_text().split()
        PIDS.unlink()  # once
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)


def when_asked_again(count: Iterator[int]) -> None:
    """The first time it was not in the store either."""
    if next(count) == 1:
        WANTED.touch()


class OfflineReplay(swift_ft.Session):
    def __init__(self, state: Any, **arguments: Any) -> None:
        super().__init__(state, **arguments, ship="on-failure", groups=[[0], [1, 2], [3]])

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if RANK == 1 and step.replayed and not (FOLDER / "asks").exists():
                (FOLDER / "asks").touch()
                for _ in range(600):
                    if (FOLDER / "down").exists():
                        break
                    threading.Event().wait(0.05)
                else:
                    raise TimeoutError("the store was not taken away")
            if RANK == 1 and not ORIGINAL and not step.replayed:
                (FOLDER / "over").touch()
            yield step


match HOW, RANK, ORIGINAL:
    case "unusable", 0, True:
        close_the_server()
        refuse_uploads_until(WANTED)
    case "unusable", 1, False:
        before_worker_is_asked(0, partial(when_asked_again, itertools.count()))
    case "unusable", 2, True:
        flip_bits()
    case "dies", 2, True:
        refuse_uploads_until(None)
        PIDS.write_text(f"{os.environ['SWIFT_AGENT_PID']} {os.getpid()}")
    case "dies", 1, False:
        before_worker_is_asked(2, kill_worker_2)
    case "offline", _, _:
        swift_ft.Session = OfflineReplay  # type: ignore[misc]
train_swift.main()
