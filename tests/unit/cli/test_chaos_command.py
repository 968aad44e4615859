"""The command line of ``swift-chaos``, without a process of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.cli.chaos.main import main

PLAN = "kill machine=1 iteration=2 point=optimizer"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--store", "/shared/store"], "--store /shared/store would be one store of all runs: put {folder}"),
        (["--store", "s3://bucket/folder"], "put {folder} into it"),
        (["--plan", ""], "--plan has no fault in it"),
        (["--plan", " ; "], "--plan has no fault in it"),
    ],
)
def test_a_mistake_gets_one_line(
    options: list[str], words: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--", script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-chaos: ")
    assert words in line
