"""Durations of tests are recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.durations import SLOW_S, durations_in, last_runs_in, merged, text_of

ROOT = Path(__file__).parents[2]
A, B = "tests/cluster/test_choice.py::test_a", "tests/stores/test_x.py::test_b"


def files(root: Path) -> Path:
    """A folder in which both files are."""
    for test in (A, B):
        (path := root / test.partition("::")[0]).parent.mkdir(parents=True)
        path.touch()
    return root


def test_what_was_measured_replaces_what_was_known(tmp_path: Path) -> None:
    found = merged({A: 10.0, B: 3.0}, {A: 14.4}, [A], root=files(tmp_path))
    assert found == {A: 14.0, B: 3.0}


@pytest.mark.parametrize(
    ("before_s", "now_s", "kept"), [(10.0, 12.4, True), (10.0, 12.6, False), (10.0, 7.4, False)]
)
def test_noise_changes_nothing(tmp_path: Path, before_s: float, now_s: float, kept: bool) -> None:
    found = merged({A: before_s}, {A: now_s}, [A], root=files(tmp_path))[A]
    assert (found == before_s) is kept


def test_noise_of_quick_tests_is_up_to_a_second(tmp_path: Path) -> None:
    root = files(tmp_path)
    assert merged({A: 0.3}, {A: 1.2}, [A], root=root) == {A: 0.3}
    assert merged({A: 0.3}, {A: 1.34}, [A], root=root) == {A: 1.3}


def test_tests_that_are_no_more_are_dropped(tmp_path: Path) -> None:
    """Those of a file that was collected, and those of a file that is gone."""
    other, gone = A + "[old]", "tests/cluster/test_gone.py::test_a"
    assert merged({A: 1.0, other: 1.0, B: 2.0, gone: 4.0}, {}, [A], root=files(tmp_path)) == {A: 1.0, B: 2.0}


def test_nothing_is_dropped_of_a_file_that_was_collected_in_part(tmp_path: Path) -> None:
    assert merged({A: 1.0, B: 2.0}, {A: 9.0}, [], root=files(tmp_path)) == {A: 9.0, B: 2.0}


def test_quick_tests_of_one_process_are_not_recorded(tmp_path: Path) -> None:
    root, unit = files(tmp_path), "tests/unit/test_a.py::test_a"
    (file := root / "tests/unit/test_a.py").parent.mkdir()
    file.touch()
    assert merged({}, {A: 1.0, unit: SLOW_S - 0.1}, [], root=root) == {A: 1.0}
    assert merged({A: 1.0}, {unit: SLOW_S}, [], root=root) == {A: 1.0, unit: SLOW_S}
    assert merged({A: 1.0, unit: 9.0}, {unit: SLOW_S - 0.1}, [], root=root) == {A: 1.0}  # it is quick by now


def test_each_test_has_its_line_in_order() -> None:
    assert text_of({B: 2.0, A: 1.5}) == f'{{\n"{A}": 1.5,\n"{B}": 2.0\n}}\n'


CONFTEST = """
from pathlib import Path
from tests.support.durations import SLOW_S, Recorder

def pytest_configure(config):
    config.pluginmanager.register(Recorder(config, Path("durations.json"), Path("last_runs.json")))

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "left_out" not in item.nodeid]
"""
TESTS = """
import pytest

@pytest.mark.parametrize("x", [0, 1])
def test_x(x): pass

def test_fails(): assert False

def test_is_skipped(): pytest.skip("here")

def test_left_out(): pass
"""


@pytest.mark.parametrize(
    "workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["one process", "two workers"]
)
def test_a_run_is_recorded(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    names = [f"tests/{folder}/test_{folder}.py" for folder in ("cluster", "stores", "unit")]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(TESTS)
    known = [
        f"{name}::test_{test}" for name in names[:2] for test in ("fails", "is_skipped", "left_out", "gone")
    ]
    (tmp_path / "durations.json").write_text(json.dumps(dict.fromkeys(known, 99.0)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "xdist",
            "--rootdir=.",
            *workers,
            "tests",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "3 failed, 6 passed, 3 skipped" in done.stdout, done.stdout + done.stderr
    found = durations_in(tmp_path / "durations.json")
    passed = {f"{name}::test_x[{x}]" for name in names[:2] for x in (0, 1)}
    assert found.keys() == passed | {test for test in known if not test.endswith("gone")}
    assert {found[test] for test in known if not test.endswith("gone")} == {99.0}
    assert all(found[test] < 99 for test in passed)
    assert last_runs_in(tmp_path / "last_runs.json").keys() == passed


@pytest.mark.parametrize("workers", [0, 2])
def test_no_test_begins_when_the_time_is_up_and_that_is_said(tmp_path: Path, workers: int) -> None:
    (tmp_path / "test_a.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", "-n", str(workers)]
    outputs = [
        subprocess.run(
            [*command, "--within", minutes, "test_a.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for minutes in ("0.000001", "60")
    ]
    assert "2 skipped" in outputs[0]
    assert "not run: 1e-06 minutes are over (--within)" in outputs[0]
    assert "2 passed" in outputs[1]
