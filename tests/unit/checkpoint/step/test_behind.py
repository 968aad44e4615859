"""A line names what a worker goes on with although it is of another iteration than the rest."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import pytest
import torch

from swift_ft.checkpoint.step.behind import say_what_is_behind
from swift_ft.program.loop_frame import EPOCHS, LOOP

Places = frozenset[tuple[str, str]]


def of_epoch(steps: Callable[[], Iterator[int]]) -> float:
    """A step reads its total and its count first, and the loss never."""
    total, count, loss, unread = 0.0, 0, 0.0, 0
    for step in steps():
        loss, unread = float(step), step
        total += loss
        count += 1
    return total / count + loss + unread


SCRIPT = """
total, count, loss = 0.0, 0, 0.0
for step in steps():
    loss = float(step)
    total += loss
    count += 1
print(total / count, loss)
"""


def frames_in(function: str, *, depth: int = 2) -> Mapping[str, FrameType]:
    return {function: sys._getframe(depth)}


def said(
    caplog: pytest.LogCaptureFixture, frames: Mapping[str, FrameType], saved: dict[str, Any], behind: Places
) -> list[str]:
    caplog.clear()
    say_what_is_behind(behind, saved, frames)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage().partition(":")[0] for record in caplog.records]


IT_HAS = "and this worker has it of an earlier iteration than"


def test_variables_of_a_function(caplog: pytest.LogCaptureFixture) -> None:
    lines = list[list[str]]()

    def steps() -> Iterator[int]:
        frames = frames_in(LOOP)
        own = frozenset({(LOOP, "total"), (LOOP, "loss")})
        lines.append(said(caplog, frames, {LOOP: {"count": 3, "unread": 2}}, own))
        lines.append(said(caplog, frames, {}, own))
        lines.append(said(caplog, frames, {LOOP: {"count": 3}}, frozenset({(LOOP, "loss")})))
        yield from (0, 1)

    of_epoch(steps)
    assert lines == [
        [f"steps go on with (loop).total, {IT_HAS} (loop).count"],
        [f"steps go on with (loop).total, {IT_HAS} step.index"],
        [],
    ]


def test_variables_of_the_script_itself(caplog: pytest.LogCaptureFixture) -> None:
    lines = list[list[str]]()

    def steps() -> Iterator[int]:
        own = frozenset({("", "total"), ("", "loss")})
        lines.append(said(caplog, frames_in(LOOP), {"": {"count": 3}}, own))
        yield from (0, 1)

    exec(compile(SCRIPT, "train.py", "exec"), {"steps": steps})
    assert lines == [[f"steps go on with total, {IT_HAS} count"]]


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ({"count": 3}, True),
        ({"count": torch.tensor(3)}, True),
        ({"name": "loss", "on": True}, False),
        ({}, False),
    ],
)
def test_attributes_of_an_object(
    beside: dict[str, Any], named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether they are a mixture shows in what was handed over."""
    own = frozenset({("meter", "sum"), (EPOCHS, "best"), ("(cells)", "add.0")})
    lines = said(caplog, {}, {"meter": beside, "other": {"count": 1}, EPOCHS: {"n": 1}}, own)
    assert lines == [f"steps go on with meter.sum, {IT_HAS} meter.count"] * named


def test_long_lists(caplog: pytest.LogCaptureFixture) -> None:
    own = frozenset(("meter", f"sum{number}") for number in range(7))
    (line,) = said(caplog, {}, {"meter": {"count": 1}}, own)
    assert line.startswith(
        "steps go on with meter.sum0, meter.sum1, meter.sum2, meter.sum3, meter.sum4, ...,"
    )
