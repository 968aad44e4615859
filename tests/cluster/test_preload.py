"""Workers and replacements begin with the modules that their machine has imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.cluster import assert_identical, one_line, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "says_what_is_imported.py"


def test_a_replacement_begins_with_the_modules(tmp_path: Path, references: Any) -> None:
    flags = ["--preload", "wave, xml.dom.minidom"]
    fault = "kill machine=1 iteration=4 point=forward"
    run = run_cluster(tmp_path, machines=2, script=training(tmp_path, SCRIPT), flags=flags, inject=fault)
    assert_identical(run, references(machines=2))
    lives = sorted((tmp_path / "imported.txt").read_text().splitlines())
    assert lives == ["0 wave xml.dom.minidom", *["1 wave xml.dom.minidom"] * 2]


def test_a_name_that_nothing_has_is_refused(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, machines=2, flags=["--preload", "no_such_module.part"])
    assert run.code == 2
    assert "--preload no_such_module.part: there is no such module here" in one_line(run)
