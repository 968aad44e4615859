"""The commands of docs/how-to/resharding.md, run on the page's own files: they print what it says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from docs.house import ROOT
from swift_ft.cli.plan.main import main
from tests.support.tutorial import blocks_of

PAGE = ROOT / "docs" / "how-to" / "resharding.md"


def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed, compared = "", 0
    for block in blocks_of(PAGE):
        if block.language == "bash":
            program, *words = shlex.split(block.text)
            assert program == "swift-plan"
            assert main(words) == 0
            printed = capsys.readouterr().out
        elif block.attributes["title"] == "output":
            assert json.loads(printed) == json.loads(block.text)
            compared += 1
        else:
            Path(block.attributes["title"]).write_text(block.text)
    assert compared == 2
