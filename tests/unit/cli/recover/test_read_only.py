"""Only ``gc`` writes to a store. The other verbs work on one that nobody can write to."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from swift_ft.cli.recover import main as command_line
from swift_ft.cli.recover.main import main
from swift_ft.errors import StoreNotWritableError
from swift_ft.offline.run_store import open_run_store
from tests.support.stored_run import make_run

ASKS = ("join", "drain", "move", "scale", "reshape", "reload")
WRITES = {"gc": "what it is for", **dict.fromkeys(ASKS, "asks a running job")}
REPLAYS = (
    "replay"  # it starts workers: tests/cluster/test_offline_replay.py compares its store before and after
)
READS = [name for name in command_line.VERBS if name not in (*WRITES, REPLAYS)]

_ALL_AND_A_WRITE = """
import sys
from pathlib import Path
from swift_ft.cli.recover.main import main
store, *commands = sys.argv[1:]
try:
    Path(store, "written").touch()
except PermissionError:
    print("not writable")
for command in commands:
    print(main(command.split("|")))
"""


def command(verb: str, store: Path, out: Path) -> list[str]:
    """A verb that this table does not know takes the store alone."""
    segment = next((store / "log").rglob("*.arrow"), store)
    given: Mapping[str, list[str]] = {
        "plan": [str(store), "--fail", "1"],
        "inspect": [str(segment)],
        "export": [str(store), "--out", str(out)],
    }
    return [verb, *given.get(verb, [str(store)]), "--json"]


def facts(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Of every file and folder: when it was changed, and its content."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.touch()
    make_run(tmp_path / "store", script)
    (tmp_path / "store/log/rank-00001/left.0123456789ab.tmp").write_bytes(b"garbage, for gc")
    return tmp_path / "store"


@pytest.fixture
def frozen(store: Path) -> Iterator[Path]:
    """No file and no folder in it may be written."""
    everything = [store, *store.rglob("*")]
    for path in everything:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    yield store
    for path in everything:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


@pytest.mark.parametrize("verb", [*READS, "gc --dry-run"])
def test_the_store_stays_as_it_is(verb: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = facts(store)
    name, *flags = verb.split()
    code = main([*command(name, store, store.parent / "report.tar.gz"), *flags])
    shown = capsys.readouterr()
    assert code in (0, 1) or "trained" in shown.err, shown.err
    assert facts(store) == before


def test_gc_writes(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So the comparison above can fail."""
    before = facts(store)
    assert main(["gc", str(store), "--yes"]) == 0
    assert facts(store) != before


def test_no_one_gets_a_writable_store_unasked(store: Path) -> None:
    before = facts(store)
    with pytest.raises(StoreNotWritableError, match="read only"):
        open_run_store(str(store)).store.write_json("a.json", {})
    with pytest.raises(StoreNotWritableError, match="read only"):
        open_run_store(str(store)).checkpoints.store.delete("run.json")
    assert facts(store) == before


def test_all_verbs_work_where_nobody_may_write(
    frozen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a snapshot, or on a share that is exported to be read."""
    copy = shutil.copytree(frozen, tmp_path / "copy")
    expected = [main(command(verb, copy, tmp_path / "other.tar.gz")) for verb in READS]
    expected.append(main([*command("gc", copy, tmp_path), "--dry-run"]))
    assert expected.count(0) >= len(READS) - 1
    capsys.readouterr()
    commands = [command(verb, frozen, tmp_path / "report.tar.gz") for verb in READS]
    commands.append([*command("gc", frozen, tmp_path), "--dry-run"])
    program = [sys.executable, "-c", _ALL_AND_A_WRITE, str(frozen), *map("|".join, commands)]
    if os.geteuid() == 0:  # who may write whatever the permissions say, unless that right is taken away
        if shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv to respect permissions")
        program = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *program]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert lines[0] == "not writable", done.stderr
    assert [int(line) for line in lines if line.isdigit()] == expected, done.stderr
    assert "Permission" not in done.stderr
    assert "Traceback" not in done.stderr
