"""Real clusters on this host: real agents, real workers, real signals."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_ft.faults import Fault, Point, parse_faults
from swift_ft.recovery.entries import event_from_dict
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.protocol import step
from tests.support.prefork import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "train_swift.py"
KILLS_IN_TURN = Path(__file__).parents[1] / "cluster" / "scripts" / "kills_in_turn.py"
OVER_NCCL_LIKE = Path(__file__).parents[1] / "cluster" / "scripts" / "over_nccl_like.py"
KILLS_OTHERS = Path(__file__).parents[1] / "cluster" / "scripts" / "kills_others.py"
SLOW_UNTIL_TOLD = KILLS_OTHERS.with_name("slow_until_told.py")
SMALL = ["--layers=8", "--width=32", "--heads=2", "--sequence=32", "--microbatch-size=1", "--microbatches=8"]
ITERATIONS = 8
CHECKPOINT_EVERY = 3
LIVE_POINTS = {Point.FORWARD, Point.BACKWARD, Point.OPTIMIZER, Point.BETWEEN}
"""Where a fault waits for the checkpoint before it. Points of a recovery do not wait."""
DEADLINE_S = 150
BACKEND = "SWIFT_TEST_BACKEND"
"""A variable: ``nccl_like`` makes all scripts train over the backend that behaves like NCCL.

With ``nccl_like_ahead`` the host runs ahead of its device there.
"""


@dataclass
class ClusterRun:
    """The results of a run."""

    folder: Path
    code: int
    output: str
    report: dict[str, Any]

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.folder / "store"

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """The recoveries, as ``swift-run --events-out`` wrote them."""
        return list(self.report["recoveries"])

    def weights(self) -> dict[str, torch.Tensor]:
        """The final weights, by the name of the file and of the parameter."""
        found = {}
        for path in sorted((self.folder / "weights").glob("rank*.pt")):
            for name, tensor in torch.load(path, map_location="cpu", weights_only=True).items():
                found[f"{path.stem}.{name}"] = tensor
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.report["events"] if event["event"] == kind]

    def last_state(self) -> State:
        """The protocol's state at the end."""
        return functools.reduce(step, map(event_from_dict, self.report["events"]), State())

    def last_plan(self) -> Plan:
        """The last plan of the protocol."""
        state, plan = State(), None
        for event in self.report["events"]:
            state = step(state, event_from_dict(event))
            plan = state.plan or plan
        assert plan is not None
        return plan


def at_once(
    *victims: int | str,
    by: int,
    iteration: int = 5,
    replayed: bool = False,
    example: str = "train_swift",
    by_signal: signal.Signals = signal.SIGKILL,
    spare: bool = False,
) -> str:
    """For ``scripts/kills_others.py`` (KILLS): a worker kills machines when it begins a step.

    With ``spare``, once a spare has joined.
    """
    when = {"by": by, "iteration": iteration, "replayed": replayed, "spare": spare}
    return json.dumps({**when, "victims": victims, "example": example, "signal": by_signal.name})


def in_turn(*victims: int, iteration: int = 5, example: str = "train_swift") -> str:
    """For ``scripts/kills_in_turn.py`` (KILLS): machines are killed when worker 0 has begun a step."""
    return json.dumps({"victims": victims, "iteration": iteration, "example": example})


def assert_struck_in_turn(run: ClusterRun, first: str, *later: str) -> None:
    """Checks that these faults struck in this order, all but the first one after a machine was lost."""
    told = [event for event in run.report["events"] if event["event"] in ("FaultInjected", "MachineLost")]
    struck = [event["fault"].partition(" committed=")[0] for event in told if "fault" in event]
    assert struck == [str(fault) for fault in parse_faults("; ".join([first, *later]))], run.output[-3000:]
    assert [event["event"] for event in told][:2] == ["FaultInjected", "MachineLost"], told


def assert_reported_once(run: ClusterRun, *survivors: int) -> None:
    """Checks that further losses did not make these workers report again, before the plan of one recovery."""
    (recovery,) = run.recoveries
    reports = [event for event in run.events("StatusReported") if event["generation"] > 1]
    of_survivors = [(event["rank"], event["generation"]) for event in reports if event["rank"] in survivors]
    assert sorted(of_survivors) == [(rank, 2) for rank in survivors]
    assert recovery["generation"] > 2


def training(folder: Path, script: Path = EXAMPLE, *, iterations: int = ITERATIONS) -> list[str]:
    """The example training, small, with its store and weights in a folder."""
    options = ["--iterations", str(iterations), "--checkpoint-every", str(CHECKPOINT_EVERY)]
    places = ["--store", str(folder / "store"), "--weights-out", str(folder / "weights")]
    return [str(script), *SMALL, *options, *places]


def over_backend(script: list[str]) -> list[str]:
    """A script with its arguments, over the backend that the environment names (BACKEND)."""
    like_nccl = os.environ.get(BACKEND) in ("nccl_like", "nccl_like_ahead")
    return [str(OVER_NCCL_LIKE), *script] if like_nccl else script


def command(
    folder: Path,
    *args: str,
    inject: str = "",
    machines: int = 4,
    flags: list[str] | None = None,
    script: list[str] | None = None,
) -> list[str]:
    """The command line of one run. A fault strikes once the checkpoint before it is committed."""
    options = over_backend([*(script if script is not None else training(folder)), *args])
    launcher = [sys.executable, "-m", "swift_ft.cli.run", "--standalone", "--machines", str(machines)]
    launcher += ["--spares", "1"]
    launcher += ["--log-dir", str(folder / "logs"), "--events-out", str(folder / "events.json")]
    # All else is as users have it: a machine may be silent for a second, and survivors help in a replay.
    launcher += ["--inject", _after_commit(inject, options), *(flags or [])]
    return launcher + options


def _after_commit(inject: str, options: Sequence[str]) -> str:
    """These faults, each after the checkpoint that a user would expect by then, however slow the disk is."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint-every", type=int)
    every = parser.parse_known_args(options)[0].checkpoint_every
    if every is None:
        return inject
    return "; ".join(str(_after_checkpoint(fault, every)) for fault in parse_faults(inject))


def _after_checkpoint(fault: Fault, every: int) -> Fault:
    newest = ((fault.iteration or 0) - 1) // every * every
    return replace(fault, committed=newest) if newest > 0 and fault.point in LIVE_POINTS else fault


def run_cluster(
    folder: Path,
    *args: str,
    inject: str = "",
    machines: int = 4,
    flags: list[str] | None = None,
    script: list[str] | None = None,
) -> ClusterRun:
    """Runs to the end, and checks that no process (hence no port) and no temporary file is left."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="swift-"))  # a short path: loaders have sockets there
    full = command(folder, *args, inject=inject, machines=machines, flags=flags, script=script)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SWIFT_TEST_FOLDER": str(folder),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(
            folder / "cache"
        ),  # torch creates it, and all processes of a user share it
    }
    with launch(full[3:], env) as process:
        end = process.wait(DEADLINE_S)
        if end.code is None:
            stacks = _stacks(end.left)
            os.kill(process.pid, signal.SIGTERM)
            output = process.wait(60).output
            pytest.fail(f"the run did not end within {DEADLINE_S} s:\n{stacks}\n{output[-6000:]}")
    output = end.output
    report_path = folder / "events.json"
    report = json.loads(report_path.read_text()) if report_path.exists() else {}
    left = [*end.left, *processes_of(folder)]
    assert not left, f"{left} were left behind:\n{output[-3000:]}"
    # A killed process leaves the folder of multiprocessing, or one that a library had for a moment; torch's
    # compiler leaves its precompiled headers.
    excused = ("pymp-", "torchinductor_", *["tmp"] * bool(report.get("recoveries")))
    files = [path for path in temporary.iterdir() if not path.name.startswith(excused)]
    shutil.rmtree(temporary)
    assert not files, f"{files} were left behind:\n{output[-3000:]}"
    run = ClusterRun(folder, end.code, output, report)
    if run.code == 0:
        assert_clean(run)
    return run


def once(folders: pytest.TempPathFactory, run: Callable[..., ClusterRun]) -> Callable[..., ClusterRun]:
    """Undisturbed runs by their arguments, each made and checked when it is first asked for.

    Args:
        folders: where each run gets its own.
        run: makes one in the folder that is its first argument. All others are the key: what makes two runs
            differ must be among them.
    """

    @functools.cache
    def made(*args: Any, **options: Any) -> ClusterRun:
        return assert_undisturbed(run(folders.mktemp("undisturbed"), *args, **options))

    return made


def run_launcher(
    module: str,
    folder: Path,
    *,
    inject: str = "",
    machines: int = 4,
    flags: list[str] | None = None,
    script: list[str] | None = None,
) -> ClusterRun:
    """Runs to the end with another launcher than ``swift-run``: one in which a test has changed something."""
    full = command(folder, inject=inject, machines=machines, flags=flags, script=script)
    done = subprocess.run(
        [sys.executable, "-m", module, *full[3:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(folder)},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert not processes_of(folder)
    run = ClusterRun(folder, 0, done.stdout, json.loads((folder / "events.json").read_text()))
    assert_clean(run)
    return run


def recover(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ``swift-recover``."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from swift_ft.cli.recover.main import main; sys.exit(main())",
            *args,
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def processes_of(folder: Path) -> list[str]:
    """The processes that have a test folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment, command = ((entry / name).read_bytes() for name in ("environ", "cmdline"))
            except OSError:  # it has ended, or belongs to another user
                continue
            if f"SWIFT_TEST_FOLDER={folder}\0".encode() in environment:
                found.append(f"{entry.name}: {command!r}")
    return found


def kill_processes_of(folder: Path) -> None:
    """End all processes that have a test folder in their environment."""
    for line in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.partition(":")[0]), signal.SIGKILL)


def _stacks(processes: Sequence[str]) -> str:
    """The stacks of processes, as far as py-spy can read them."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if spy is None:
        return "\n".join([*processes, "(py-spy is not installed: no stacks)"])
    command = [spy, "dump", "--pid"]
    found = []
    for process in processes:
        done = subprocess.run(
            [*command, process.partition(":")[0]], capture_output=True, text=True, timeout=60, check=False
        )
        found.append(f"{process}\n{done.stdout or done.stderr}")
    return "\n".join(found)


def one_line(run: ClusterRun) -> str:
    """The one line that a user can act on. A worker that ends may do so in the middle of a handshake."""
    lines = [
        line
        for line in run.output.splitlines()
        if line.startswith("swift-run: ") and "ended the connection before it proved" not in line
    ]
    assert len(lines) == 1, run.output[-3000:]
    assert "Traceback" not in run.output
    return lines[0]


def assert_computed_twice(run: ClusterRun, iteration: int) -> None:
    """Checks that the example has said more of an iteration, which is verified, than of the one before it."""
    said = [line for line in run.output.splitlines() if line.endswith(tuple("0123456789"))]
    of_each = [len([s for s in said if f"iteration {number}:" in s]) for number in (iteration - 1, iteration)]
    assert of_each[1] > of_each[0], run.output[-3000:]


def assert_undisturbed(run: ClusterRun) -> ClusterRun:
    """Checks that a run ended well and had no recovery, and returns it."""
    assert run.code == 0, run.output[-6000:]
    assert not run.recoveries, run.output[-6000:]
    return run


def assert_identical(run: ClusterRun, reference: ClusterRun) -> None:
    """Checks that the weights are those of an undisturbed run, bit for bit."""
    assert run.code == 0, run.output[-6000:]
    ours, theirs = run.weights(), reference.weights()
    assert ours.keys() == theirs.keys()
    assert len(theirs) > 0
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{different[:5]} differ:\n{run.output[-3000:]}"


def by_layer(run: ClusterRun) -> dict[str, torch.Tensor]:
    """The final weights by the name of the parameter, on whichever worker it is."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in run.weights().items():
        found[name.partition(".")[2]] = tensor
    return found


def assert_same_layers(run: ClusterRun, reference: ClusterRun) -> None:
    """Checks that each layer's weights are those of an undisturbed run, on whichever worker it is."""
    assert run.code == 0, run.output[-6000:]
    ours, theirs = by_layer(run), by_layer(reference)
    assert theirs.keys() == ours.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def assert_clean(run: ClusterRun) -> None:
    """Checks that the store has no orphaned temporary files."""
    leftovers = [str(path) for path in run.store.rglob("*") if ".tmp" in path.name]
    assert not leftovers, leftovers
