"""The example training, in which worker 1 is replaced and something befalls its replay (PEERS).

unusable   worker 0's server is gone before it is asked, and worker 2's gives each segment with a flipped bit
dies       nothing of worker 2's log gets into the store, and its machine dies when it is asked for its log
offline    the replay waits until the store is down (the file `down`), and the store until it is over (`over`)
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
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


def ship_nothing() -> None:
    def refuse(self: Shipper, path: str) -> None:
        raise OSError("nothing of this log gets into the store")

    Shipper._ship = refuse
    PIDS.write_text(f"{os.environ['SWIFT_AGENT_PID']} {os.getpid()}")


def kill_worker_2_when_it_is_asked() -> None:
    of, open_ = LogPeers.of, Peer.open
    doomed = []

    def remember(self: LogPeers, generation: int, rank: int) -> Peer | None:
        peer = of(self, generation, rank)
        if rank == 2:
            doomed.append(peer)
        return peer

    def kill_first(self: Peer, name: str) -> Any:
        if self in doomed and PIDS.exists():
            pids = PIDS.read_text().split()
            PIDS.unlink()  # once
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
        return open_(self, name)

    LogPeers.of, Peer.open = remember, kill_first


class OfflineReplay(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if step.replayed and not (FOLDER / "asks").exists():
                (FOLDER / "asks").touch()
                for _ in range(600):
                    if (FOLDER / "down").exists():
                        break
                    threading.Event().wait(0.05)
                else:
                    raise TimeoutError("the store was not taken away")
            if not step.replayed:
                (FOLDER / "over").touch()
            yield step


match HOW, RANK, ORIGINAL:
    case "unusable", 0, True:
        close_the_server()
    case "unusable", 2, True:
        flip_bits()
    case "dies", 2, True:
        ship_nothing()
    case "dies", 1, False:
        kill_worker_2_when_it_is_asked()
    case "offline", 1, False:
        swift_ft.Session = OfflineReplay  # type: ignore[misc]
train_swift.main()
