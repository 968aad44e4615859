"""What swift-run does with bad input, with an old store, with several hosts, and at Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import (
    ITERATIONS,
    ClusterRun,
    assert_identical,
    command,
    one_line,
    processes_of,
    run_cluster,
    training,
)

MISUSE = Path(__file__).parent / "scripts" / "misuse.py"
BARE = Path(__file__).parent / "scripts" / "bare.py"


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    ticks = int(deadline_s / 0.05)
    for _ in range(ticks):
        if found := condition():
            return found
        threading.Event().wait(0.05)
    raise TimeoutError(what)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ------------------------------------------------------------------------------------------- bad input


def test_store_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, not a directory")
    run = run_cluster(tmp_path)
    assert run.code == 2
    assert "cannot be written" in one_line(run)
    assert (tmp_path / "store").read_text() == "a file, not a directory"


def test_unknown_flag(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, flags=["--machinez", "4"])
    assert run.code == 2
    assert "--machinez" in run.output or "unrecognized" in run.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--machines", "0"], "at least 1"),
        (["--inject", "kill everything"], "cannot be read"),
        (["--resume", "--fresh"], "exclude each other"),
        (["--rdzv-backend", "etcd"], "not supported"),
    ],
)
def test_flags_without_sense(flags: list[str], words: str, tmp_path: Path) -> None:
    run = run_cluster(tmp_path, flags=flags)
    assert run.code == 2
    assert words in one_line(run)
    assert not (tmp_path / "store").exists()


def test_script_that_is_not_there(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, script=["nowhere.py"])
    assert run.code == 2
    assert "nowhere.py" in one_line(run)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("two sessions", "has a session already"),
        ("not attached", "attach_pipeline(schedule) or session.attach_ddp(model) before the first step"),
        ("no schedule", "takes a schedule"),
        ("no DDP", "takes a torch.nn.parallel.DistributedDataParallel"),
        ("two pipelines", "protects one pipeline"),
        ("without with", "Write `with step:`"),
        ("gradients carried over", "zero_grad"),
    ],
)
def test_misuse_of_a_session(kind: str, words: str, tmp_path: Path) -> None:
    flags = ["--machines", "2", "--spares", "0"]
    run = run_cluster(tmp_path, flags=flags, script=[str(MISUSE), kind, str(tmp_path / "store")])
    assert run.code == 2
    assert words in one_line(run)


# ------------------------------------------------------------------------------------------ old stores


def test_store_of_an_earlier_run(tmp_path: Path, references: Any) -> None:
    """A second run asks; --resume goes on to the same weights, --fresh begins anew, strangers are refused."""
    first = run_cluster(tmp_path, "--iterations", "6")
    assert first.code == 0
    before = snapshot(first.store)

    again = run_cluster(tmp_path)
    assert again.code == 2
    assert "--resume" in one_line(again)
    assert "--fresh" in one_line(again)
    assert snapshot(first.store) == before

    other = run_cluster(tmp_path, flags=["--resume", "--machines", "2"])
    assert other.code == 2
    assert "another topology" in one_line(other)
    assert snapshot(first.store) == before

    donor = run_cluster(tmp_path / "other", "--iterations", "2")
    foreign = next((donor.store / "log/rank-00000").glob("*.arrow"))
    for own in (first.store / "log/rank-00000").glob("*.arrow"):
        own.unlink()
    stranger = first.store / "log/rank-00000" / foreign.name
    stranger.write_bytes(foreign.read_bytes())
    refused = run_cluster(tmp_path, flags=["--resume"])
    assert refused.code == 2
    assert "another run" in one_line(refused)
    assert stranger.exists()
    stranger.unlink()

    resumed = run_cluster(
        tmp_path, flags=["--resume"], inject="kill machine=3 iteration=7 point=forward microbatch=1"
    )
    assert_identical(resumed, references())
    assert min(event["iteration"] for event in resumed.events("Committed")) == 6
    assert resumed.recoveries[0]["way"] == "replay"

    fresh = run_cluster(tmp_path, flags=["--fresh"])
    assert_identical(fresh, references())


def test_a_place_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("years of work")
    run = run_cluster(tmp_path, flags=["--fresh"])
    assert run.code == 2
    assert "holds no run of swift_ft" in one_line(run)
    assert (tmp_path / "store" / "thesis.tex").exists()


# ------------------------------------------------------------------------------------- torchrun scripts


def test_torchrun_script(tmp_path: Path) -> None:
    """A script without a session runs as under torchrun, and is started again after a death."""
    run = run_cluster(tmp_path, "die", flags=["--max-restarts", "3"], script=[str(BARE)])
    assert run.code == 0, run.output
    assert run.output.count("sum 6.0") >= 4
    assert "attempt 2" in run.output or "attempt 3" in run.output


def test_several_workers_on_a_machine(tmp_path: Path) -> None:
    run = run_cluster(
        tmp_path, flags=["--machines", "2", "--spares", "0", "--nproc-per-node", "2"], script=[str(BARE)]
    )
    assert run.code == 0, run.output
    assert "[machine 1 rank 3] sum 6.0" in run.output


def test_script_that_fails(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, "raise", script=[str(BARE)])
    assert run.code == 1
    assert "swift-run: worker 1: ValueError: on purpose" in run.output


# -------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_signal(number: int, tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(tmp_path)}
    process = subprocess.Popen(
        command(tmp_path, script=training(tmp_path, iterations=10_000)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "iteration 2:" in line:
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output[-2000:]
    assert "stopped by" in output
    assert not processes_of(tmp_path)


def test_thawed_machine_does_no_harm(tmp_path: Path, references: Any) -> None:
    """A machine that was frozen, and replaced, finds itself fenced when it wakes up."""
    iterations = 120
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(tmp_path)}
    fault = "stop machine=1 iteration=5 point=forward microbatch=3"
    process = subprocess.Popen(
        command(
            tmp_path,
            inject=fault,
            flags=["--heartbeat-timeout", "2"],
            script=training(tmp_path, iterations=iterations),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if "iteration 8:" in line:
            frozen = stopped_processes(tmp_path)
            assert len(frozen) == 2  # the agent and the worker
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
    assert process.wait(timeout=60) == 0, "".join(output[-50:])
    run = ClusterRun(tmp_path, 0, "".join(output), json.loads((tmp_path / "events.json").read_text()))
    assert [r["slots"] for r in run.recoveries] == [[1]]
    assert any(event["machine"].endswith(".1") for event in run.events("Joined"))  # it came back as a spare
    assert_identical(run, references("--iterations", str(iterations)))


def stopped_processes(folder: Path) -> list[int]:
    pids = [int(line.split(":")[0]) for line in processes_of(folder)]
    return [pid for pid in pids if "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()]


# --------------------------------------------------------------------------------------- several hosts


def test_one_launcher_per_host(tmp_path: Path, references: Any) -> None:
    """Started like torchrun, one launcher per machine; the one that started the store is killed, and a new
    one takes its place."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(tmp_path)}
    flags = ["--nnodes", "4", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "hosts"]
    launcher = [sys.executable, "-m", "swift_ft.cli.run", *flags, "--log-dir", str(tmp_path / "logs")]
    script = training(tmp_path, iterations=60)

    def start(node: int) -> subprocess.Popen[str]:
        log = (tmp_path / f"node{node}-{os.urandom(2).hex()}.txt").open("w")
        return subprocess.Popen(
            [*launcher, "--node-rank", str(node), *script],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )

    def seen(text: str) -> bool:
        return any(text in path.read_text() for path in tmp_path.glob("node*.txt"))

    nodes = [start(0)]
    wait_until(lambda: not is_free(port), "the store")
    nodes += [start(node) for node in range(1, 4)]
    wait_until(lambda: seen("iteration 10:"), "training")
    os.killpg(nodes[0].pid, signal.SIGKILL)
    nodes[0].wait()
    nodes[0] = start(0)
    codes = [node.wait(timeout=120) for node in nodes]
    output = "".join(path.read_text() for path in tmp_path.glob("node*.txt"))
    assert codes == [0, 0, 0, 0], output[-5000:]
    assert_identical(ClusterRun(tmp_path, 0, output, {}), references("--iterations", "60"))
    wait_until(lambda: not processes_of(tmp_path), "the store's end")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_wrong_number_of_machines(tmp_path: Path) -> None:
    """A launcher that was started for another number of machines is refused, the others go on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(tmp_path)}
    base = [
        sys.executable,
        "-m",
        "swift_ft.cli.run",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "x",
    ]
    first = subprocess.Popen([*base, "--nnodes", "2", str(BARE)], env=env, start_new_session=True)
    wait_until(lambda: not is_free(port), "the store")
    second = subprocess.run(
        [*base, "--nnodes", "3", str(BARE)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 2
    assert "2 machines" in second.stderr
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    first.wait(timeout=30)
    for line in processes_of(tmp_path):  # the store outlives a launcher that was not part of an ended job
        os.kill(int(line.split(":")[0]), signal.SIGKILL)
    assert ITERATIONS
