"""What accelerate counts for itself is put back with the rest."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from swift_ft.checkpoint.library_state import library_state


class Accelerator:
    """As much of accelerate's as counts."""

    def __init__(self) -> None:
        self.step, self.sync_gradients = 0, True

    def microbatch(self) -> bool:
        self.step += 1
        self.sync_gradients = self.step % 2 == 0
        return self.sync_gradients


def test_without_such_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.accelerator", raising=False)
    assert library_state() == {}


def test_an_accumulation_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("accelerate.accelerator")
    module.Accelerator = Accelerator
    monkeypatch.setitem(sys.modules, module.__name__, module)
    accelerator = Accelerator()
    (state,) = library_state().values()
    assert [accelerator.microbatch() for _ in range(2)] == [False, True]
    before = state.state_dict()
    accelerator.microbatch()
    state.load_state_dict(before)
    assert [accelerator.microbatch() for _ in range(2)] == [False, True]


def test_the_names_are_accelerates() -> None:
    """Where it is installed."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    (state,) = library_state().values()
    before = state.state_dict()
    with accelerator.accumulate():
        assert not accelerator.sync_gradients
    assert state.state_dict() == {"steps": [1], "sync_gradients": [False]}
    state.load_state_dict(before)
    assert (accelerator.step, accelerator.sync_gradients) == (0, True)
