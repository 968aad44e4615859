"""The suite for parts passes parts that bear what a worker goes through, and fails others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ledger import Ledger

from swift_ft.extend import Interruption, Part, StepInfo
from swift_ft.recovery.events import StatusReported
from swift_ft.testing import PartConformanceTests


class Idle(Part):
    name = "idle"


class TestPartThatDoesNothing(PartConformanceTests):
    @pytest.fixture
    def part(self) -> Part:
        return Idle()


class TestLedger(PartConformanceTests):
    @pytest.fixture
    def part(self, tmp_path: Path) -> Part:
        return Ledger(tmp_path / "ledger.txt")


class _TakesAName(Part):
    name = "state"


class _ExpectsAStep(Idle):
    """Takes each interruption for one of a step that it has seen begin."""

    def begin(self, step: StepInfo) -> None:
        self.step = step

    def interrupted(self, interruption: Interruption) -> None:
        assert self.step.iteration >= 0


class _WaitsForOthers(Idle):
    def interrupted(self, interruption: Interruption) -> None:
        threading.Event().wait()


class _RaisesAsItLetsGo(Idle):
    def put_back(self, interruption: Interruption) -> None:
        raise RuntimeError("nothing was begun")


class _SaysAnotherIteration(Idle):
    def report(self, report: StatusReported) -> StatusReported:
        return replace(report, iteration=0)


class _SaysNothing(Idle):
    def report(self, report: StatusReported) -> StatusReported:
        return None  # type: ignore[return-value]


Check = Callable[[PartConformanceTests, Part], None]


def an_interrupted_step(suite: PartConformanceTests, part: Part) -> None:
    suite.test_an_interrupted_step_is_repeated(part, caught=False)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (_TakesAName, PartConformanceTests.test_its_name_is_its_own),
        (Part, PartConformanceTests.test_its_name_is_its_own),
        (_ExpectsAStep, PartConformanceTests.test_a_replacement_is_interrupted_before_its_first_step),
        (_WaitsForOthers, PartConformanceTests.test_it_lets_go_without_waiting_for_others),
        (_RaisesAsItLetsGo, PartConformanceTests.test_it_lets_go_without_waiting_for_others),
        (_RaisesAsItLetsGo, an_interrupted_step),
        (_SaysAnotherIteration, PartConformanceTests.test_its_report_is_that_of_the_worker),
        (_SaysNothing, PartConformanceTests.test_its_report_is_that_of_the_worker),
    ],
)
def test_a_part_that_does_not_bear_it_fails(
    kind: type[Part], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift_ft.testing.part_conformance._DEADLINE_S", 0.2)
    check(PartConformanceTests(), Idle()) if kind is not Part else None
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        check(PartConformanceTests(), kind())
