"""A launcher that is forked is as one that is executed: how it begins and ends, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.commands import descendants
from swift_ft.errors import SwiftError
from swift_ft.launch.signals import handles
from swift_ft.testing.chaos.forked_launchers import LAUNCHER, ForkServer
from swift_ft.testing.chaos.launchers import Launchers
from swift_ft.testing.chaos.leftovers import MARK, processes_of
from swift_ft.testing.chaos.running import run_trial
from swift_ft.testing.chaos.trial import Outcome, Training
from tests.support.waiting import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "small_replicas.py"
DEADLINE_S = 120.0
TELLS = """
import json, os, random, signal, sys, tempfile
told = {
    "folder": os.getcwd(),
    "path": sys.path,
    "arguments": sys.argv,
    "temporary": tempfile.gettempdir(),
    "names": sorted(os.environ),
    "values": {name: os.environ[name] for name in ("TMPDIR", "PYTHONPATH", "GIVEN", "OMP_NUM_THREADS")},
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
    "open": len(os.listdir("/proc/self/fd")),
}
with open("told.json", "w") as file:
    json.dump([told, random.random()], file)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as made:
        yield made


def told_by_a_script(folder: Path, script: Path, server: ForkServer | None) -> tuple[dict[str, Any], float]:
    """What a script sees in a folder that is named as those of all other runs."""
    temporary = folder / "temporary"
    temporary.mkdir()
    path = os.pathsep.join([str(script.parent / "library"), os.environ.get("PYTHONPATH", "")])
    end = Launchers().run(
        [LAUNCHER, "--standalone", "--nproc-per-node", "1", str(script), "--lr", "0.1"],
        folder,
        DEADLINE_S,
        output=script.parent / "output",
        cwd=folder,
        environment={"TMPDIR": str(temporary), "PYTHONPATH": path, "GIVEN": "yes"},
        server=server,
    )
    assert end.code == 0, (script.parent / "output").read_text()
    assert (end.cpu_s is None) == (server is None)
    told, drawn = json.loads((folder / "told.json").read_text())
    return told, drawn


def test_it_begins_with_what_a_new_interpreter_has(
    tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has a variable, and lacks another one, and was started elsewhere."""
    script, folder = tmp_path / "tells.py", tmp_path / "run"
    script.write_text(TELLS)
    found = []
    for one in (None, server, server):
        folder.mkdir()
        found.append(told_by_a_script(folder, script, one))
        folder.rename(tmp_path / f"run-{len(found)}")
    (executed, _), (forked, drawn), (_, drawn_again) = found
    assert forked == executed
    assert drawn != drawn_again


@pytest.mark.parametrize("arguments", [["--version"], ["--standalone", "nothing.py"], ["--no-such-flag"]])
def test_it_ends_as_one_that_is_executed(arguments: list[str], tmp_path: Path, server: ForkServer) -> None:
    said = []
    for one in (None, server):
        output = tmp_path / "output"
        run = Launchers().run(
            [LAUNCHER, *arguments], tmp_path, DEADLINE_S, output=output, cwd=tmp_path, server=one
        )
        said.append((run.code, output.read_text()))
    executed, forked = said
    assert forked == executed
    assert forked[1]


def test_a_signal_ends_it_with_a_line_from_the_first_moment_on(tmp_path: Path, server: ForkServer) -> None:
    """It waits for a token then, and has not begun a run."""
    token, output = tmp_path / "token", tmp_path / "output"
    os.mkfifo(token)
    arguments = ["--standalone", "--token-file", str(token), str(SCRIPT)]
    with (
        output.open("wb") as file,
        server.started(arguments, file.fileno(), cwd=tmp_path, environment=os.environ) as launcher,
    ):
        wait_until(lambda: handles(launcher.pid, signal.SIGTERM), "a handler of SIGTERM")
        launcher.terminate()
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert output.read_text().endswith("swift-run: stopped by SIGTERM\n")


LEAVES = """
import os, pathlib, subprocess, time
started = subprocess.Popen(["sleep", "600"], start_new_session=True)
forked = os.fork()
if forked == 0:
    os.setsid()
    os.closerange(0, 4096)
    time.sleep(600)
    os._exit(0)
for pid in (started.pid, forked):
    pathlib.Path({told!r}, str(pid)).touch()
"""


def test_what_a_forked_run_leaves_behind_is_found_and_ended(tmp_path: Path, server: ForkServer) -> None:
    """In sessions of their own, with the run's environment or, where nothing was executed, the server's."""
    told, script, folder = tmp_path / "told", tmp_path / "leaves.py", tmp_path / "run"
    for made in (told, folder):
        made.mkdir()
    script.write_text(f"{LEAVES.format(told=str(told))}\n{SCRIPT.read_text()}")
    launch = ("--standalone", "--machines", "2", "--heartbeat-timeout", "8")
    training = Training(launch, (str(script),), "", DEADLINE_S, server=server)
    trial = run_trial(training, folder)
    assert trial.outcome == Outcome.LEAKED, trial.reason
    left = {path.name for path in told.iterdir()}
    assert len(left) == 4
    assert {word for word in trial.reason.split() if word.isdigit()} >= left
    for pid in left:
        wait_until(lambda pid=pid: not Path("/proc", pid).exists(), f"the end of process {pid}")  # type: ignore[misc]
    assert processes_of(folder) == []


TOOL = """
import sys, pathlib
from swift_ft.testing.chaos.forked_launchers import LAUNCHER, ForkServer
from swift_ft.testing.chaos.launchers import LAUNCHERS, StoppedError
folder = pathlib.Path(sys.argv[1])
output = folder / "output"
launch = [LAUNCHER, "--standalone", "--machines", "2", "--log-dir", str(folder / "logs")]
with LAUNCHERS.stopped_by_signals(), ForkServer() as server:
    try:
        LAUNCHERS.run([*launch, sys.argv[2]], folder, 600, output=output, cwd=folder, server=server)
    except StoppedError as error:
        sys.exit(128 + error.number)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_tool_that_is_ended_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """No launcher, no process of its machines, no server and no keeper."""
    told, script, folder = tmp_path / "told", tmp_path / "waits.py", tmp_path / "run"
    for made in (told, folder):
        made.mkdir()
    script.write_text(
        f"import os, pathlib, time\npathlib.Path({str(told)!r}, str(os.getpid())).touch()\ntime.sleep(600)"
    )
    tool = subprocess.Popen([sys.executable, "-c", TOOL, str(folder), str(script)])
    wait_until(lambda: len([*told.iterdir()]) == 2, "the beginning of both workers")
    known = processes_of(folder)
    workers = {int(path.name) for path in told.iterdir()}
    assert workers < {*known}, "workers are known by what the kernel shows of their environment"
    started = [*descendants(tool.pid), *known]
    tool.send_signal(number)
    assert tool.wait(60) == code
    for pid in started:
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"the end of process {pid}")  # type: ignore[misc]
    assert processes_of(folder) == []


def test_a_run_says_that_its_server_has_ended(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with ForkServer() as ended:
        ended._process.kill()
        ended._process.wait()
        with pytest.raises(SwiftError, match="launchers are forked from has ended"):
            Launchers().run([LAUNCHER], tmp_path, 60.0, output=output, cwd=tmp_path, server=ended)


def test_only_the_launcher_is_forked(tmp_path: Path, server: ForkServer) -> None:
    """Any other module is executed, and has the run's environment."""
    (tmp_path / "other.py").write_text(f"import os, sys; sys.exit(os.environ[{MARK!r}] == {str(tmp_path)!r})")
    end = Launchers().run(["other"], tmp_path, 60.0, output=tmp_path / "output", cwd=tmp_path, server=server)
    assert (end.code, end.cpu_s) == (1, None)
