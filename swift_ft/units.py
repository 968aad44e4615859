"""Bytes, rates, times and numbers of things as text: ``400GB``, ``5GB/s``, ``1h30m``, ``workers 1 and 2``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from swift_ft.errors import UsageError

T = TypeVar("T")

__all__ = [
    "counted",
    "format_bytes",
    "format_moment",
    "format_seconds",
    "in_spans",
    "named",
    "parse_bandwidth",
    "parse_bytes",
    "parse_seconds",
    "some",
    "spans_of",
]

_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([kKmMgGtTpPeE]?)(i?)([bB]?)\s*")
_TIMES = re.compile(rf"({_NUMBER})\s*(ms|seconds?|sec|s|minutes?|min|m|hours?|h|days?|d)?\s*")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Bytes from ``400GB`` (10^9), ``400GiB`` (2^30), ``4e11`` or ``400 gb``. ``b`` means bytes too.

    Raises:
        UsageError: if the text is not an amount of bytes.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{text!r} is not an amount of bytes: write it like 400GB, 400GiB or 4e11")
    base = 1024 if match[3] else 1000
    value = float(match[1]) * float(base ** _POWERS[match[2].upper()])
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is too many bytes: write a finite amount, like 400GB")
    return round(value)


def parse_bandwidth(text: str) -> float:
    """Bytes per second from ``5GB/s``, ``40Gbit/s``, ``40Gbps`` (bits) or ``5e9``.

    Raises:
        UsageError: if the text is not a bandwidth, or is zero.
    """
    short = text.strip()
    bits = re.fullmatch(r"(.*?)(?:bits?/s|bps)", short)
    value = parse_bytes(bits[1] + "B") / 8 if bits else parse_bytes(re.sub(r"/s(?:ec)?$", "", short))
    if value <= 0:
        raise UsageError(f"the bandwidth {text!r} is zero: it must be positive")
    return float(value)


def parse_seconds(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``1.5h``, ``1h30m``, ``54 days``.

    Raises:
        UsageError: if the text is not a duration.
    """
    rest, total, found = text.strip(), 0.0, False
    while rest:
        match = _TIMES.match(rest)
        if match is None or (found and not match[2]):
            raise UsageError(f"{text!r} is not a duration: write it like 90s, 1.5h, 1h30m or 54d")
        unit = match[2] or "s"
        total += float(match[1]) * _SECONDS["ms" if unit == "ms" else unit[0]]
        found, rest = True, rest[match.end() :]
    if not found or not math.isfinite(total):
        raise UsageError(f"{text!r} is not a duration: write it like 90s, 1.5h, 1h30m or 54d")
    return total


def format_bytes(count: float) -> str:
    """``512 B``, ``1.54 kB``, ``230 MB``: powers of ten, three significant digits."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 999.5 or unit == "PB":
            break
        count /= 1000
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """``0.012 s``, ``3.46 s``, ``2 min 5 s``, ``2.25 h``, ``54 d``."""
    if seconds >= 360_000:
        return f"{seconds / 86400:.4g} d"
    if seconds >= 7200:
        return f"{seconds / 3600:.4g} h"
    if round(seconds) >= 100:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def format_moment(at: float) -> str:
    """``2026-11-27 12:00:00 UTC``, from seconds since 1970."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 machine``, ``2 machines``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def named(noun: str, numbers: Iterable[int]) -> str:
    """``worker 1``, ``workers 1, 2 and 5``; of many only the first."""
    numbers = sorted(numbers)
    return f"{noun}{'s' * (len(numbers) > 1)} {some(numbers, and_last=True)}"


def some(
    things: Sequence[T],
    most: int = 8,
    of: str = "",
    *,
    word: Callable[[T], str] = str,
    and_last: bool = False,
) -> str:
    """``a, b``; of many only the first: ``a, b and 5 more``.

    Args:
        things: all of them.
        most: so many are written.
        of: a noun for the others: ``a, b and 5 more tensors``.
        word: writes one of them.
        and_last: where all are written, the last one follows an "and", too.
    """
    shown = [word(thing) for thing in things[:most]]
    if len(things) > most:
        last = f"{len(things) - most} more{f' {of}' if of else ''}"
    elif and_last and len(shown) > 1:
        last = shown.pop()
    else:
        return ", ".join(shown)
    return f"{', '.join(shown)} and {last}"


def shortened(names: Sequence[str], most: int = 5) -> str:
    """``a, b``; of many only the first: ``a, b, ...``."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def spans_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each stretch of numbers that follow each other, ascending."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def in_spans(spans: Iterable[tuple[int, int]], to: str = " to ") -> str:
    """``0 to 2, 7``, from the first and the last number of each stretch."""
    return ", ".join(str(first) if first == last else f"{first}{to}{last}" for first, last in spans)
