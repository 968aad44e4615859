"""Epochs: a loss in any of their steps, at their ends and beginnings, leaves what an undisturbed run does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "epochs.py"


CHOSEN = {("nested", 5, "optimizer", 0), ("function", 4, "reduce", 1), ("function", 6, "between", 0)}
"""One in the middle of an epoch, one in its last step, one in its first; the others are thorough."""


def cases() -> Iterator[Any]:
    for form, iteration, point, machine in product(
        ("nested", "function"), (4, 5, 6), ("reduce", "reduced", "optimizer", "between"), (0, 1)
    ):
        marks = () if (form, iteration, point, machine) in CHOSEN else pytest.mark.thorough
        yield pytest.param(form, iteration, point, machine, marks=marks)


@pytest.mark.parametrize(("form", "iteration", "point", "machine"), [*cases()])
def test_a_loss(form: str, iteration: int, point: str, machine: int, tmp_path: Path) -> None:
    run = assert_put_back(
        tmp_path, SCRIPT, form, inject=f"kill machine={machine} iteration={iteration} point={point}"
    )
    for rank in range(2):
        lines = (run.folder / f"log{rank}.jsonl").read_text().splitlines()
        iterations = [json.loads(line)["iteration"] for line in lines]
        if rank != machine:
            assert iterations == [*range(12)]
        else:  # the record of its very last step may be missing
            assert iterations in ([*range(12)], [i for i in range(12) if i != iteration])


@pytest.mark.parametrize("form", ["nested", pytest.param("function", marks=pytest.mark.thorough)])
def test_a_replica_that_is_behind_the_end_of_an_epoch(form: str, tmp_path: Path) -> None:
    """Worker 0 has completed the epoch's last step, and worker 1 has not: its script cannot skip lines."""
    inject = "kill machine=2 iteration=5 point=optimizer"
    run = assert_put_back(tmp_path, SCRIPT, form, "apart", inject=inject, machines=3)
    assert "worker 1: its state is of epoch 2 now and its script is in epoch 1" in run.output
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica", "replica"]


def returns() -> Iterator[Any]:
    for form, kind, iteration in product(("nested", "function"), ("memory", "returns"), (5, 6, 7)):
        chosen = (form, kind, iteration) in {("nested", "memory", 7), ("function", "returns", 5)}
        yield pytest.param(form, kind, iteration, marks=() if chosen else pytest.mark.thorough)


@pytest.mark.parametrize(("form", "kind", "iteration"), [*returns()])
def test_all_return_to_a_checkpoint(form: str, kind: str, iteration: int, tmp_path: Path) -> None:
    if kind == "memory":
        inject = f"kill machine=1 iteration={iteration} point=optimizer"
    else:
        inject = "; ".join(f"kill machine={m} iteration={iteration} point=optimizer" for m in range(2))
    assert_put_back(tmp_path, SCRIPT, form, kind, inject=inject)
