"""How long tests take: seconds by test in `tests/durations.json`, and when each last passed.

With `--record-durations` a run adds what it has measured. Each test has a line of the file, in the order of
the names, so that two recordings can be compared. A test's time includes its fixtures: what a whole file or
session shares is counted at the test that asked for it first. A test that failed or was skipped keeps its
earlier time, and so does one whose new time differs by less than a quarter or a second: so much is noise. Of
the tests of one process only slow ones have a line.

A case that did not run when its function was first recorded has the mean of those that did. That estimate
looks like any other time, and is replaced when the case is recorded.

`tests/last_runs.json` has the day on which each test of clusters and stores passed last.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
LAST_RUNS = Path(__file__).parents[1] / "last_runs.json"
_RECORDED = ("cluster", "theirs", "stores", "deploy", "gpu")
"""Folders of tests/. All others have tests of one process only."""
SLOW_S = 3.0
"""A test of one process that takes longer takes turns (`choice.py`)."""
_NOISE_S = 1.0
_NOISE = 1 / 4
_COLLECTED = "swift_collected"


def durations_in(file: Path = DURATIONS) -> dict[str, float]:
    """Seconds by test. Empty if nothing was recorded yet."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def last_runs_in(file: Path = LAST_RUNS) -> dict[str, str]:
    """The day of each test's last pass, as in 2026-11-28. Empty if nothing was recorded yet."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def text_of(durations: Mapping[str, float] | Mapping[str, str]) -> str:
    """The text of a file of durations or days."""
    return json.dumps(durations, indent=0, sort_keys=True, ensure_ascii=False) + "\n"


def of_file(test: str) -> str:
    """The file of a test."""
    return test.partition("::")[0]


def merged(
    known: Mapping[str, float], measured: Mapping[str, float], collected: Iterable[str], *, root: Path
) -> dict[str, float]:
    """The durations after a run: what it measured, without the tests that are no more.

    Args:
        known: seconds by test, before.
        measured: seconds of the tests that passed.
        collected: all tests of the files that were collected as a whole.
        root: the folder that the names of tests begin at.
    """
    kept = [*collected]
    whole = {of_file(test) for test in kept}
    gone = {test for test in known if of_file(test) in whole or not (root / of_file(test)).exists()} - {*kept}
    new = {test: _without_noise(known.get(test), s) for test, s in measured.items()}
    gone |= {test for test, s in new.items() if not _of_many_processes(test) and s < SLOW_S}
    return {test: s for test, s in {**known, **new}.items() if test not in gone}


def _without_noise(before_s: float | None, now_s: float) -> float:
    if before_s is not None and abs(now_s - before_s) < max(_NOISE_S, _NOISE * before_s):
        return before_s
    return round(now_s, 1) if now_s < 10 else float(round(now_s))


def _of_many_processes(test: str) -> bool:
    return Path(test).parts[1] in _RECORDED


class Recorder:
    """A plugin of pytest that adds a run's durations to a file.

    Under xdist, workers tell the controller which tests they have collected, and it hears how long each took.
    """

    def __init__(self, config: pytest.Config, file: Path = DURATIONS, last_runs: Path = LAST_RUNS) -> None:
        self._config = config
        self._file = file
        self._last_runs = last_runs
        self._collected: set[str] = set()
        self._took_s: dict[str, float] = defaultdict(float)
        self._passed: set[str] = set()
        self._not_passed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)  # before any are left out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Notes all tests of the files, unless single tests of a file were named."""
        if not any("::" in name for name in self._config.args):
            self._collected.update(item.nodeid for item in items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Adds what a worker of xdist has collected."""
        self._collected.update(getattr(node, "workeroutput", {}).get(_COLLECTED, ()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up a test's three phases: setup, call and teardown."""
        self._took_s[report.nodeid] += report.duration
        if not report.passed:
            self._not_passed.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Tells the controller, or writes the files."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_COLLECTED] = sorted(self._collected)  # xdist sends it afterwards
            return
        measured = {test: self._took_s[test] for test in self._passed - self._not_passed}
        durations = merged(durations_in(self._file), measured, self._collected, root=self._config.rootpath)
        self._file.write_text(text_of(durations))
        days = last_runs_in(self._last_runs) | dict.fromkeys(measured, datetime.now(UTC).date().isoformat())
        kept = {test: day for test, day in days.items() if test in durations and _of_many_processes(test)}
        self._last_runs.write_text(text_of(kept))
