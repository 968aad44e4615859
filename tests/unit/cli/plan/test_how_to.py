"""The commands of docs/how-to/layouts.md do what the page says, with the files that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.house import ROOT
from swift_ft.cli.plan.main import main
from tests.support.tutorial import blocks_of
from tests.unit.test_how_to import commands_of

PAGE = ROOT / "docs" / "how-to" / "layouts.md"


def test_commands_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = set()
    for block in blocks_of(PAGE):
        if block.language == "json":
            Path(block.attributes["title"]).write_text(block.text)
        if block.language == "bash":
            for program, *words in commands_of(block):
                assert program == "swift-plan"
                assert main(words) == 0, capsys.readouterr().err
                seen.add(words[0])
    assert seen >= {"templates", "instantiate", "reconfigure", "compare"}
