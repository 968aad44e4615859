"""Commands with verbs begin at once: only the verb that is asked for is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swift_ft.cli.plan import main as plan
from swift_ft.cli.recover import main as recover
from swift_ft.cli.verb import load_verb

COMMANDS = {"recover": recover, "plan": plan}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_verbs_needs_none_of_them(command: str) -> None:
    code = f"""
import sys
from swift_ft.cli.{command}.main import VERBS, main
try:
    main(["--help"])
except SystemExit:
    pass
print("imported", sorted({{"torch", "swift_ft.offline"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported []"
    for line in COMMANDS[command].VERBS.values():
        assert line[:20] in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_verb_can_be_asked_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS[command].VERBS:
        with pytest.raises(SystemExit, match="0"):
            COMMANDS[command].main([name, "--help"])
        assert "--json" in capsys.readouterr().out
        assert load_verb(f"swift_ft.cli.{command}", name).description


@pytest.mark.parametrize("command", COMMANDS)
def test_a_verb_that_does_not_exist_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[command].main(["mend", "somewhere"]) == 2
    assert "'mend'" in capsys.readouterr().err
