"""Parts of a script's own, and of an installed package, are called at each moment of a worker's training."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ITERATIONS, assert_identical, one_line, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "own_part.py"

BROUGHT = """
import os
from pathlib import Path

from swift_ft.extend import Part

class Diary(Part):
    name = "diary"

    def _note(self, moment):
        with open(os.environ["DIARY"], "a") as file:
            file.write(f"{moment}\\n")

    def start(self):
        self._note("start")

    def interrupted(self, interruption):
        self._note("interrupted")

    def close(self):
        self._note("close")

def bring():
    return Diary()

def bring_nothing():
    return None

def bring_another():
    return "no part"
"""


def install(folder: Path, function: str) -> None:
    """A package with an entry point, as an installer leaves it."""
    folder.mkdir()
    (folder / "diary_package.py").write_text(BROUGHT)
    facts = folder / "diary_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: diary-package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[swift_ft.parts]\ndiary = diary_package:{function}\n")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "installed"), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv("DIARY", str(tmp_path / "diary.txt"))
    return tmp_path / "installed"


@pytest.mark.parametrize("point", ["forward", "backward", "optimizer", "between"])
def test_what_a_step_writes_is_taken_back_with_it(tmp_path: Path, references: Any, point: str) -> None:
    fault = f"kill machine=1 iteration=6 point={point}"
    run = run_cluster(tmp_path, machines=3, script=training(tmp_path, SCRIPT), inject=fault)
    assert len(run.events("FaultInjected")) == 1
    assert_identical(run, references(machines=3))
    whole = "".join(f"{iteration}\n" for iteration in range(ITERATIONS))
    for rank in range(3):
        assert (tmp_path / f"ledger-{rank}.txt").read_text() == whole, rank


def test_an_installed_package_brings_a_part_to_every_worker(
    tmp_path: Path, references: Any, package: Path
) -> None:
    reference = references(machines=3)  # before it is installed
    install(package, "bring")
    run = run_cluster(tmp_path, machines=3, inject="kill machine=1 iteration=6 point=forward")
    assert_identical(run, reference)
    moments = Counter((tmp_path / "diary.txt").read_text().splitlines())
    assert (moments["start"], moments["close"]) == (4, 3)
    assert moments["interrupted"] in (1, 2), "one of the survivors may learn of the loss between two steps"


def test_a_package_may_bring_nothing_for_a_training(tmp_path: Path, package: Path) -> None:
    install(package, "bring_nothing")
    assert run_cluster(tmp_path, machines=2).code == 0


def test_what_is_no_part_ends_the_run_with_one_line(tmp_path: Path, package: Path) -> None:
    install(package, "bring_another")
    run = run_cluster(tmp_path, machines=2)
    assert run.code == 2
    assert "takes a subclass of swift_ft.extend.Part, made, not 'no part'" in one_line(run)


def test_what_cannot_be_loaded_is_named(tmp_path: Path, package: Path) -> None:
    install(package, "no_such_function")
    run = run_cluster(tmp_path, machines=2)
    assert run.code == 2
    line = one_line(run)
    assert "The package diary-package brings something for swift_ft.parts that cannot be loaded" in line
    assert "diary = diary_package:no_such_function" in line
