"""Workers and replacements begin with the modules that their machine has imported."""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster import assert_identical, one_line, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "says_what_is_imported.py"


def test_a_replacement_begins_with_the_modules(tmp_path: Path) -> None:
    reference = run_cluster(tmp_path / "undisturbed", machines=2)
    folder = tmp_path / "killed"
    flags = ["--preload", "wave, xml.dom.minidom"]
    fault = "kill machine=1 iteration=4 point=forward"
    run = run_cluster(folder, machines=2, script=training(folder, SCRIPT), flags=flags, inject=fault)
    assert_identical(run, reference)
    lives = sorted((folder / "imported.txt").read_text().splitlines())
    assert lives == ["0 wave xml.dom.minidom", *["1 wave xml.dom.minidom"] * 2]


def test_a_name_that_nothing_has_is_refused(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, machines=2, flags=["--preload", "no_such_module.part"])
    assert run.code == 2
    assert "--preload no_such_module.part: there is no such module here" in one_line(run)
