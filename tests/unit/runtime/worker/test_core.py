"""A worker's core does what orders and the ends of steps ask for, and nothing else, in this order."""

from __future__ import annotations

import pytest

from swift_ft.runtime.worker.core import WorkerCore
from tests.unit.runtime.worker.checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_core(check: Check) -> None:
    check(WorkerCore)
