"""Shared by all tests: the import path of processes that tests start, and a report of missing parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.missing import missing_parts

_ROOT = Path(__file__).parents[1]

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_ROOT), str(_ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists in red the tests that were skipped because something installable is missing."""
    skipped = terminalreporter.stats.get("skipped", [])
    parts = missing_parts(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    if parts:
        terminalreporter.section("PARTS ARE MISSING", red=True, bold=True)
        for part, count in parts.items():
            terminalreporter.line(f"{count} tests were skipped because parts are missing: {part}", red=True)
