"""A difference between a replica's gradients and a spare's: whose fault it may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_ft.checkpoint.own_gradients import OwnStep
from swift_ft.config.audit import AuditRequest
from swift_ft.host.processor import CHOOSES_BY_TIME
from swift_ft.offline.gradient_audit import compared

BEGIN = {"the parameter weight": 1, "the buffer mean": 2, "the variable scale": 3}
STEP = OwnStep(0, "a processor", "", BEGIN, {"the gradient of weight": 4, "the gradient of bias": 5})
WRONG = replace(STEP, gradients={**STEP.gradients, "the gradient of bias": 6})
REQUEST = AuditRequest(
    store="store",
    machine=1,
    begin=20,
    until=40,
    out="out",
    kind="script",
    target="train.py",
    args=(),
    setup=(),
    log_since=0,
    moved=0,
    machines=3,
    workers=2,
    epoch=0,
    limit_s=60.0,
    start_values={},
    gradients=True,
)


def test_what_came_out_as_recorded_is_clean() -> None:
    assert compared(REQUEST, {2: STEP, 3: STEP}, {2: STEP, 3: STEP}).slots == (1,)


def test_a_difference_names_the_worker_and_the_gradient() -> None:
    found = compared(REQUEST, {2: STEP, 3: WRONG}, {2: STEP, 3: STEP})
    assert (found.rank, found.iteration, found.tensors) == (3, 20, "the gradient of bias")
    assert (found.slots, found.problem) == ((), "")
    again = compared(REQUEST, {2: STEP, 3: WRONG}, {2: STEP, 3: STEP})
    assert found.digest == again.digest  # two spares that agree
    other = replace(WRONG, gradients={**STEP.gradients, "the gradient of bias": 7})
    assert compared(REQUEST, {3: WRONG}, {3: other}).digest != found.digest


@pytest.mark.parametrize(
    ("spare", "said"),
    [
        (replace(STEP, host="another one"), "it computes on a processor, and the spare on another one"),
        (replace(STEP, begin={**BEGIN, "the parameter weight": 9}), "the parameter weight"),
        (replace(STEP, begin={**BEGIN, "the variable scale": 9}), "the variable scale"),
        (replace(STEP, begin={**BEGIN, "the earlier gradient of bias": 9}), "the earlier gradient of bias"),
        (replace(STEP, begin={"the variable scale": 3}), "the buffer mean, the parameter weight"),
        (replace(STEP, begin={**BEGIN, "the variable scale": 0}), "the variable scale"),
        (replace(STEP, begin={**BEGIN, "the variable mean": 9}), "the variable mean"),
    ],
)
def test_nobody_is_at_fault_where_the_step_began_with_something_else(spare: OwnStep, said: str) -> None:
    found = compared(REQUEST, {3: WRONG}, {3: spare})
    assert (found.iteration, found.slots) == (None, ())
    assert "worker 3 has other gradients in iteration 20" in found.problem
    assert said in found.problem
    assert compared(REQUEST, {3: STEP}, {3: spare}).slots == (1,)  # what it began with has not mattered


def test_variables_as_at_the_start_are_not_in_the_notes() -> None:
    spare = replace(STEP, begin={**BEGIN, "the variable rate": 0})
    assert compared(REQUEST, {3: WRONG}, {3: spare}).rank == 3


def test_a_variable_that_cannot_be_compared_is_an_excuse() -> None:
    begin = {**BEGIN, "the variable stream": -1}
    theirs, ours = replace(WRONG, begin=begin), replace(STEP, begin=begin)
    assert "the variable stream" in compared(REQUEST, {3: theirs}, {3: ours}).problem


def test_a_difference_counts_more_than_what_cannot_be_said_of_another_worker() -> None:
    other = replace(STEP, begin={**BEGIN, "the buffer mean": 9})
    found = compared(REQUEST, {2: WRONG, 3: WRONG}, {2: other, 3: STEP})
    assert (found.rank, found.problem) == (3, "")


def test_kernels_that_are_chosen_by_time_accuse_nobody() -> None:
    host = f"a GPU, {CHOOSES_BY_TIME}"
    theirs, ours = replace(WRONG, host=host), replace(STEP, host=host)
    assert CHOOSES_BY_TIME in compared(REQUEST, {3: theirs}, {3: ours}).problem
