"""The wall clocks of other machines, for the check of this one's.

A machine tells its time at the port where it is watched. It reads its clock after the connection was begun,
and before the answer has come: half of the time in between is the most by which a reading is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from swift_ft.launch.health.facts import ClockReading
from swift_ft.network import Channel, JobSecret, connect
from swift_ft.observe.waits import waiting

CLOCK = "clock"
"""The purpose of a connection to an agent's port."""

_MOST_ASKED = 3
"""One of them may be the one whose clock is wrong."""
_LIMIT_S = 5.0


def tell_time(asker: Channel) -> None:
    """Serve one who asks for this machine's time."""
    try:
        asker.send({"at": time.time()})
        asker.receive(_LIMIT_S)  # until the other side has it, and closes
    finally:
        asker.close()


def read_clocks(addresses: Sequence[str], secret: JobSecret) -> tuple[ClockReading, ...]:
    """Compare this machine's wall clock with those of some others, as far as they answer in time.

    Args:
        addresses: (``host:port``) of the others, of which few are asked.
        secret: the job's.
    """
    asked = addresses[:: -(-len(addresses) // _MOST_ASKED) or 1]
    if not asked:
        return ()
    with (
        waiting("other machines to tell their time", _LIMIT_S),
        ThreadPoolExecutor(_MOST_ASKED) as at_once,  # one that is gone answers only after its time
    ):
        readings = [*at_once.map(partial(_read_clock, secret=secret), asked)]
    return tuple(reading for reading in readings if reading is not None)


def _read_clock(address: str, secret: JobSecret) -> ClockReading | None:
    """None if that machine does not answer."""
    own, began = time.time(), time.monotonic()
    try:
        line = connect(address, secret, CLOCK, timeout_s=_LIMIT_S)
        try:
            told = line.receive(max(0.0, _LIMIT_S - (time.monotonic() - began)))
        finally:
            line.close()
    except OSError:
        return None
    half_s = (time.monotonic() - began) / 2
    if told is None or not isinstance(at := told.get("at"), float):
        return None
    return ClockReading(address, at - (own + half_s), half_s)
