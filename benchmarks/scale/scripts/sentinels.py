"""Many sentinels in one process, without training and a journal: `benchmarks/scale/swarm.py` starts it.

The arguments are seconds of silence and the names of machines. It prints their addresses, then each loss that
one of them reports. It reads the ring of all machines, and then which of them are lost. All lines are JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from swift_ft.launch.detection.policy import LostMachine
from swift_ft.launch.detection.sentinel import Sentinel
from swift_ft.network import JobSecret, Port
from swift_ft.recovery.orders import neighbours_of

_printing = threading.Lock()


def say(**what: Any) -> None:
    """Print one line."""
    with _printing:
        print(json.dumps(what), flush=True)


class Machines:
    """The machines of this process, and the ring as far as it knows it."""

    def __init__(self, silence_s: float, names: list[str]) -> None:
        self._ring: dict[str, str] = {}
        self._watched: dict[str, tuple[str, ...]] = {}
        secret = JobSecret.of_token("a token that all machines share")
        ports = {name: Port("127.0.0.1", secret) for name in names}
        self._sentinels = {
            name: Sentinel(silence_s=silence_s, on_lost=self._report, port=port, secret=secret)
            for name, port in ports.items()
        }
        say(addresses={name: port.address for name, port in ports.items()})

    def _report(self, lost: LostMachine) -> None:
        if lost.machine in self._ring:  # what an agent asks its state
            say(lost=lost.machine, at=time.monotonic(), reason=lost.reason)

    def obey(self, order: dict[str, Any]) -> None:
        """Take over the ring, or a loss."""
        if "ring" in order:
            self._ring = order["ring"]
            for name in self._sentinels:
                self._watch(name)
            say(ready=len(self._sentinels))
        else:
            self._ring.pop(order["lost"], None)
            for name, watched in list(self._watched.items()):
                if order["lost"] in watched:
                    self._watch(name)

    def _watch(self, name: str) -> None:
        self._watched[name] = neighbours_of(name, self._ring)
        self._sentinels[name].watch({other: self._ring[other] for other in self._watched[name]})


if __name__ == "__main__":
    machines = Machines(float(sys.argv[1]), sys.argv[2:])
    for line in sys.stdin:
        machines.obey(json.loads(line))
