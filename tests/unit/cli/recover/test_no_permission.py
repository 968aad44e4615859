"""Stores that this user may not read, or not write: one line, exit code 2, and nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.journals import RUN, checkpoint, opening, store_with

NOBODY = 65534
AS_NOBODY = f"""\
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from swift_ft.cli.recover.main import main, parser

def run(arguments):
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = main(arguments)
    return int(code), errors.getvalue().splitlines()

good, commands = sys.argv[1], json.loads(sys.argv[2])
parser()  # imports all verbs
assert run(["status", good])[0] == 0  # imports all that is imported late
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
print(json.dumps([run(command) for command in commands]))
"""
EVENTS = [*opening(3), *checkpoint(3, 0)]


@pytest.fixture
def store() -> Iterator[Path]:
    """A store of root's, which all may read until a test changes that. No one may enter pytest's folders."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("store", "copy"):
            store_with(f"{folder}/{name}", EVENTS, machines=3)
        yield Path(folder) / "store"


def as_nobody(store: Path, *commands: list[str]) -> list[tuple[int, list[str]]]:
    """The exit code of each command, and its lines on stderr."""
    arguments = [str(store.with_name("copy")), json.dumps(commands)]
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, lines) for code, lines in json.loads(done.stdout)]


def content(store: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def test_a_store_that_may_not_be_read(store: Path) -> None:
    before = content(store)
    script = store.with_name("train.py")
    script.touch()
    hidden = store.with_name("hidden") / "train.py"
    hidden.parent.mkdir(mode=0o700)
    hidden.touch()
    store.chmod(0o700)
    ended = as_nobody(
        store,
        ["status", str(store)],
        ["verify", str(store)],
        ["plan", str(store), "--fail", "1"],
        ["export", str(store), "--out", "/tmp/never-written.tar.gz"],
        ["gc", str(store), "--dry-run"],
        ["replay", str(store), "--machine", "1", "--out", "/tmp/never-written", "--", str(script)],
    )
    replay = ["replay", str(store.with_name("copy")), "--machine", "1", "--out", "/tmp/never-written", "--"]
    [(code, lines)] = as_nobody(store, [*replay, str(hidden)])
    assert (code, len(lines)) == (2, 1)
    assert f"{hidden}" in lines[0]
    for code, lines in ended:
        assert (code, len(lines)) == (2, 1), lines
        (line,) = lines
        assert line.startswith(f"swift-recover: file://{store} cannot be read (")
        assert "ermission" in line
    assert content(store) == before
    assert not list(Path("/tmp").glob("never-written*"))


def test_a_part_of_a_store_that_may_not_be_read(store: Path) -> None:
    (store / "runs" / RUN / "journal").chmod(0o700)
    [(code, lines)] = as_nobody(store, ["status", str(store)])
    assert (code, len(lines)) == (2, 1), lines
    (line,) = lines
    assert "cannot be read (" in line


def test_gc_of_a_store_that_may_not_be_written(store: Path) -> None:
    leftover = store / "log" / "rank-00000" / "g00001.arrow.0123456789ab.tmp"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    before = content(store)
    [(code, lines)] = as_nobody(store, ["gc", str(store), "--yes"])
    assert (code, len(lines)) == (2, 1), lines
    (line,) = lines
    assert "ermission" in line
    assert content(store) == before
