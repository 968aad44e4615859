"""The tutorial, as a newcomer would type it: every command is run, and what it prints is compared."""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tutorial import Block, blocks_of, pattern_of

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
DEADLINE_S = 150


def run(block: Block, folder: Path) -> str:
    """Runs a block of commands as one script; returns what it printed."""
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    script = ["bash", "-euo", "pipefail", "-c", block.text]
    with subprocess.Popen(
        script,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, f"line {block.line} ended with {process.returncode}:\n{output[-4000:]}"
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tutorial has been run. Each text must match what the command before it has printed."""
    folder, output = tmp_path_factory.mktemp("tutorial"), ""
    for block in blocks_of(TUTORIAL):
        if block.skipped:
            continue
        if block.language == "python":
            (folder / block.attributes["title"]).write_text(block.text)
        elif block.language == "bash":
            output = run(block, folder)
        else:
            assert block.language == "text"
            any_number = block.attributes.get("title") == "for example"
            for line in block.text.splitlines():
                pattern = pattern_of(line, any_number=any_number)
                assert pattern.search(output), f"line {block.line}: no {line!r} in\n{output[-4000:]}"
    return folder


def losses(path: Path, iteration: int) -> list[str]:
    """What a run printed as the loss of an iteration."""
    return re.findall(rf"iteration {iteration}: loss (\S+)", path.read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("runs", [("plain", "injected", "resumed"), ("stages_plain", "stages")])
def test_all_trainings_end_alike(folder: Path, runs: tuple[str, ...]) -> None:
    ends = [losses(folder / f"{name}.txt", 49) for name in runs]
    assert all(end == ends[0] for end in ends)
    assert len(ends[0]) == 1


@pytest.mark.thorough
def test_a_replay_prints_the_same_losses_again(folder: Path) -> None:
    first, again = losses(folder / "stages.txt", 31)
    assert first == again
    assert [first] == losses(folder / "stages_plain.txt", 31)


@pytest.mark.thorough
def test_a_replica_repeats_no_completed_iteration(folder: Path) -> None:
    assert losses(folder / "injected.txt", 31) == losses(folder / "plain.txt", 31)


@pytest.mark.parametrize(("name", "changed_name"), [("plain", "train"), ("stages_plain", "stages")])
def test_the_highlighted_lines_are_those_that_change(name: str, changed_name: str) -> None:
    blocks = (block for block in blocks_of(TUTORIAL) if block.language == "python")
    scripts = {block.attributes["title"]: block for block in blocks}
    plain, changed = scripts[f"{name}.py"], scripts[f"{changed_name}.py"]
    before = [line.strip() for line in plain.text.splitlines()]
    after = [line.strip() for line in changed.text.splitlines()]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    new = {
        number + 1
        for tag, _, _, begin, end in matcher.get_opcodes()
        if tag != "equal"
        for number in range(begin, end)
        if after[number]
    }
    assert new == {int(number) for number in changed.attributes["hl_lines"].split()}, "what the site shows"
    marked = {number for number, line in enumerate(after, 1) if line.endswith("  # new")}
    assert new == marked, "what a reader of the file sees, where nothing is highlighted"
    assert len(new) < 10


def test_what_is_free_in_a_printed_line() -> None:
    assert pattern_of("[1.5 s] iteration 32").search("[12.25 s] iteration 32")
    assert not pattern_of("[1.5 s] iteration 32").search("[1.5 s] iteration 33")
    assert pattern_of("iteration 32", any_number=True).search("iteration 7")
    assert pattern_of("20, ... ago (20)").search("20, a minute ago (20)")
    assert not pattern_of("20, ... ago (20)").search("20, a minute ago (40)")
