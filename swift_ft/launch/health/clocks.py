"""The wall clocks of other machines, for the check of this one's.

A machine tells its time at the port where it is watched. It reads its clock after the connection was begun,
and before the answer has come: half of the time in between is the most by which a reading is wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Thread

from swift_ft.launch.health.facts import ClockReading
from swift_ft.network import Channel, JobSecret, connect
from swift_ft.observe.waits import waiting
from swift_ft.units import format_seconds

CLOCK = "clock"
"""The purpose of a connection to an agent's port."""

_MOST_ASKED = 3
"""One of them may be the one whose clock is wrong."""
_LIMIT_S = 1.5
"""For all of them: a machine that comes back holds up the others' recovery. Who is gone does not answer."""
_MOST_APART_S = 120.0
"""Clocks that NTP keeps are milliseconds apart. Kerberos (HDFS) refuses who is 300 s off, S3 who is 900 s;
and their own clocks may be wrong, too."""


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
    answers: SimpleQueue[ClockReading | None] = SimpleQueue()
    # No pool, which would wait for its threads at the end: a name that is looked up has no limit.
    for address in asked:
        Thread(target=_answer, args=(answers, address, secret), name="read a clock", daemon=True).start()
    readings, until = [], time.monotonic() + _LIMIT_S
    with waiting("other machines to tell their time", _LIMIT_S), contextlib.suppress(Empty):
        for _ in asked:
            readings.append(answers.get(timeout=max(0.0, until - time.monotonic())))
    return tuple(reading for reading in readings if reading is not None)


def contradicting(readings: Sequence[ClockReading]) -> ClockReading | None:
    """The most exact one of the readings by which this machine's clock is wrong.

    None unless most of two or more others agree with each other and differ from it: of two clocks nobody
    knows which one is wrong, and the first machine of a run would keep all others out.
    """
    apart = _apart(readings)
    agreeing = max(
        ([one for one in apart if 0 <= one.ahead_s - least.ahead_s <= _MOST_APART_S] for least in apart),
        key=len,
        default=[],
    )
    if len(agreeing) < 2 or 2 * len(agreeing) <= len(readings):
        return None
    return min(agreeing, key=lambda one: one.error_s)


def doubt_of(readings: Sequence[ClockReading]) -> str:
    """The difference of two clocks of which nobody knows the wrong one, in words. Empty if there is none."""
    apart = _apart(readings)
    if not apart or 2 * len(apart) < len(readings) or contradicting(readings) is not None:
        return ""
    return difference_in_words(min(apart, key=lambda one: one.error_s))


def _apart(readings: Sequence[ClockReading]) -> list[ClockReading]:
    """Those of clocks that differ from this machine's by more than servers allow."""
    return [one for one in readings if abs(one.ahead_s) - one.error_s > _MOST_APART_S]


def difference_in_words(reading: ClockReading) -> str:
    """The difference of this machine's clock from another one's, and the places to look at."""
    address, ahead_s, error_s = reading
    return (
        f"this machine's clock is {format_seconds(abs(ahead_s))} {'behind' if ahead_s > 0 else 'ahead of'} "
        f"that of {address} (known to {error_s:.3f} s), and {_MOST_APART_S:g} s is the most: look at "
        "`chronyc tracking`, or at whatever sets its clock (NTP)"
    )


def _answer(answers: SimpleQueue[ClockReading | None], address: str, secret: JobSecret) -> None:
    reading = None
    try:
        reading = _read_clock(address, secret)
    finally:
        answers.put(reading)


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
