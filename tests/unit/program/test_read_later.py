"""The variables of a function whose values of now it may still read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from swift_ft.program.read_later import read_later

Steps = Callable[[], Iterator[int]]


def a_batch_and_a_queue(steps: Steps) -> None:
    queue, batch, result = [0], [0], 0
    for step in steps():
        with nullcontext():
            batch = [step]
            queue = (batch + queue)[:3]
            result = sum(batch)
        print(result)
    print(result, batch)


def set_in_some_steps(steps: Steps) -> None:
    scale, seen = 1, 0
    for step in steps():
        if step % 2:
            scale = step
        seen = scale
        for part in range(2):
            seen += part
    print(seen)


def in_place(steps: Steps) -> None:
    ring, total, fresh = [0] * 4, 0, [0]
    for step in steps():
        ring[0] = step
        total += step
        fresh = [2 * one for one in range(step)]
        del fresh


def a_loop_by_hand(steps: Steps) -> None:
    count, last, taken = 0, 0, iter(steps())
    while True:
        step = next(taken, None)
        if step is None:
            break
        last = step
        count = count + last
    print(count)


def shared_with_a_function(steps: Steps) -> None:
    total = 0

    def add(value: int) -> None:
        nonlocal total
        total += value

    for step in steps():
        add(step)


def passes_on(steps: Steps) -> Iterator[int]:
    before, now = 0, 0
    for step in steps():
        now = step
        yield now + before
        before = now


def many(steps: Steps) -> None:
    """With long jumps, and instructions behind others."""
    kept, dropped = 0, 0
    for step in steps():
        try:
            dropped = step
        except ValueError:
            dropped = 0
        a, b = dropped, step
        a, b = b, a
        kept = kept + a if a > b else kept - b
        assert kept is not None
        dropped = kept if step else a
        assert isinstance(dropped, int), f"{dropped!r} {kept!r} {step!r} {a!r} {b!r}"


@pytest.mark.parametrize(
    ("function", "read", "not_read"),
    [
        (a_batch_and_a_queue, {"queue"}, {"batch", "result"}),
        (set_in_some_steps, {"scale"}, {"seen", "part"}),
        (in_place, {"ring", "total"}, {"fresh"}),
        (a_loop_by_hand, {"count", "taken"}, {"step", "last"}),
        (shared_with_a_function, {"total", "add"}, {"step"}),
        (passes_on, {"before"}, {"now"}),
        (many, {"kept"}, {"dropped", "a", "b"}),
    ],
)
def test_read_later(function: Callable[[Steps], Any], read: set[str], not_read: set[str]) -> None:
    found: list[frozenset[str]] = []

    def steps() -> Iterator[int]:
        frame = sys._getframe(1)
        while frame.f_code is not function.__code__:
            assert frame.f_back is not None
            frame = frame.f_back
        for number in range(3):
            found.append(read_later(frame))
            yield number

    [*(function(steps) or ())]
    assert len(found) == 3
    assert all(read <= one for one in found), found
    assert not any(not_read & one for one in found), found
