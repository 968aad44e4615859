"""Real clusters on this host: real agents, real workers, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_ft.recovery.events import event_from_dict
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.protocol import step

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "train_swift.py"
KILLS_OTHERS = Path(__file__).parent / "scripts" / "kills_others.py"
SMALL = ["--layers=8", "--width=32", "--heads=2", "--sequence=32", "--microbatch-size=1", "--microbatches=8"]
ITERATIONS = 8
CHECKPOINT_EVERY = 3
DEADLINE_S = 150


@dataclass
class ClusterRun:
    """What a run left behind."""

    folder: Path
    code: int
    output: str
    report: dict[str, Any]

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return list(self.report["recoveries"])

    def weights(self) -> dict[str, torch.Tensor]:
        found = {}
        for path in sorted((self.folder / "weights").glob("rank*.pt")):
            for name, tensor in torch.load(path, weights_only=True).items():
                found[f"{path.stem}.{name}"] = tensor
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.report["events"] if event["event"] == kind]

    def last_plan(self) -> Plan:
        """What the protocol decided last."""
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
) -> str:
    """For ``scripts/kills_others.py`` (KILLS): a worker kills machines when it begins a step."""
    when = {"by": by, "iteration": iteration, "replayed": replayed}
    return json.dumps({**when, "victims": victims, "example": example})


def training(folder: Path, script: Path = EXAMPLE, *, iterations: int = ITERATIONS) -> list[str]:
    """The example training, small, with its store and weights in a folder."""
    options = ["--iterations", str(iterations), "--checkpoint-every", str(CHECKPOINT_EVERY)]
    places = ["--store", str(folder / "store"), "--weights-out", str(folder / "weights")]
    return [str(script), *SMALL, *options, *places]


def command(
    folder: Path,
    *,
    inject: str = "",
    machines: int = 4,
    flags: list[str] | None = None,
    script: list[str] | None = None,
) -> list[str]:
    """The command line of one run."""
    launcher = [sys.executable, "-m", "swift_ft.cli.run", "--standalone", "--machines", str(machines)]
    launcher += ["--spares", "1"]
    launcher += ["--log-dir", str(folder / "logs"), "--events-out", str(folder / "events.json")]
    launcher += ["--heartbeat-timeout", "4", "--inject", inject, "--helpers", "0", *(flags or [])]
    return launcher + (script if script is not None else training(folder))


def run_cluster(
    folder: Path,
    *args: str,
    inject: str = "",
    machines: int = 4,
    flags: list[str] | None = None,
    script: list[str] | None = None,
) -> ClusterRun:
    """Run to the end, and see that nothing is left of it: no process (and so no port), no temporary file."""
    temporary = folder / "temporary"
    temporary.mkdir(parents=True, exist_ok=True)
    full = [*command(folder, inject=inject, machines=machines, flags=flags, script=script), *args]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SWIFT_TEST_FOLDER": str(folder),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(
            folder / "cache"
        ),  # torch makes it, and all processes of a user share it
    }
    process = subprocess.Popen(
        full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        stacks = stacks_of(folder)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"the run did not end within {DEADLINE_S} s:\n{stacks}\n{output[-6000:]}")
    report_path = folder / "events.json"
    report = json.loads(report_path.read_text()) if report_path.exists() else {}
    assert not processes_of(folder), f"processes were left behind:\n{output[-3000:]}"
    left = [*temporary.iterdir()]
    assert not left, f"{left} were left behind:\n{output[-3000:]}"
    run = ClusterRun(folder, process.returncode, output, report)
    if run.code == 0:
        assert_clean(run)
    return run


def processes_of(folder: Path) -> list[str]:
    """Processes that carry a test folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"SWIFT_TEST_FOLDER={folder}\0".encode() in environment:
                found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes()!r}")
    return found


def stacks_of(folder: Path) -> str:
    """What all processes of a run are doing, as far as it can be seen."""
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid"]
    found = []
    for process in processes_of(folder):
        done = subprocess.run(
            [*command, process.partition(":")[0]], capture_output=True, text=True, timeout=60, check=False
        )
        found.append(f"{process}\n{done.stdout or done.stderr}")
    return "\n".join(found)


def one_line(run: ClusterRun) -> str:
    """The one line that a user can act on."""
    lines = [line for line in run.output.splitlines() if line.startswith("swift-run: ")]
    assert len(lines) == 1, run.output[-3000:]
    assert "Traceback" not in run.output
    return lines[0]


def assert_identical(run: ClusterRun, reference: ClusterRun) -> None:
    """Bit for bit the weights of an undisturbed run."""
    assert run.code == 0, run.output[-6000:]
    ours, theirs = run.weights(), reference.weights()
    assert ours.keys() == theirs.keys()
    assert len(theirs) > 0
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{different[:5]} differ:\n{run.output[-3000:]}"


def assert_clean(run: ClusterRun) -> None:
    """No orphaned temporary files in the store."""
    leftovers = [str(path) for path in run.store.rglob("*") if ".tmp" in path.name]
    assert not leftovers, leftovers
