"""The example scripts: how little swift_ft changes, and what a benchmark reads from the plain one."""

import ast
import difflib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from instrument import Trace

EXAMPLES = Path(__file__).parents[3] / "examples"


def code_of(script: str) -> list[str]:
    """Returns the lines of a script without its docstring, empty lines and indentation."""
    source = (EXAMPLES / script).read_text()
    docstring = ast.parse(source).body[0]
    lines = source.splitlines()[docstring.end_lineno :]
    return [line.strip() for line in lines if line.strip()]


def test_swift_ft_takes_fewer_than_ten_lines() -> None:
    difference = list(difflib.ndiff(code_of("train_minimal.py"), code_of("train_swift.py")))
    added = [line for line in difference if line.startswith("+ ")]
    removed = [line for line in difference if line.startswith("- ")]
    assert 0 < len(added) < 10, "\n".join(added)
    assert removed == ["- for iteration in range(args.iterations):"]


def test_a_trainer_like_that_of_torchtitan_changes_in_ten_lines() -> None:
    plain, swift = (code_of(f"integrations/titan_{name}.py") for name in ("plain", "swift"))
    difference = list(difflib.ndiff(plain, swift))
    added = [line for line in difference if line.startswith("+ ")]
    removed = [line for line in difference if line.startswith("- ")]
    assert 0 < len(added) <= 10, "\n".join(added)
    assert removed == [
        "- for _ in range(config.training.steps):",
        "- if trainer.is_due(validation.interval):",
        "- trainer.validated(trainer.validate())",
        "- if trainer.is_due(checkpoint.interval):",
        "- trainer.save()",
    ]


def test_the_plain_script_trains_what_the_minimal_script_trains() -> None:
    plain = code_of("train_plain.py")
    missing = [line for line in code_of("train_minimal.py") if line not in plain]
    assert missing == ["for iteration in range(args.iterations):"]


def test_a_trace_has_the_time_when_the_process_started_not_when_the_trace_was_made(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    code = (
        f"import time; time.sleep(0.3); from instrument import Trace; Trace({str(path)!r}, 2)('finished', 7)"
    )
    began = time.time()
    subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=True)
    start, finished = map(json.loads, path.read_text().splitlines())
    assert (start["event"], start["rank"], start["iteration"]) == ("start", 2, None)
    assert (finished["event"], finished["rank"], finished["iteration"]) == ("finished", 2, 7)
    assert finished["at"] - start["at"] >= 0.3
    assert start["at"] == pytest.approx(began, abs=0.25)


def test_no_trace_is_written_where_none_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Trace(None, 0)("finished", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_happens_in_the_forward_of_its_microbatch_and_only_once(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "trace"
    code = f"""if True:
        from pathlib import Path
        from torch import nn, zeros
        from instrument import Trace, kill_in_forward
        module = nn.Identity()
        kill_in_forward(module, 5, 3, Path({str(marker)!r}), Trace({str(path)!r}, 1))
        for microbatch in range(5):
            print(microbatch, flush=True)
            module(zeros(1))
    """
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=False
        )
        for _ in range(2)
    )
    assert first.returncode == -signal.SIGKILL
    assert first.stdout.split() == ["0", "1", "2", "3"]
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(event["event"], event["iteration"]) for event in events][:2] == [("start", None), ("kill", 5)]
    assert second.returncode == 0, second.stderr
    assert second.stdout.split() == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("script", ["train_minimal.py", "train_plain.py"])
def test_help_names_every_option_with_its_default(script: str) -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, script, "--help"]
    shown = subprocess.run(
        command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "--microbatch-size" in shown
    assert "default: 192" in shown
