"""swift-run with bad input, with an old store, with several hosts, and at Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_ft.config.exit_codes import EXIT_KEPT_OUT
from swift_ft.units import format_seconds
from tests.support.cluster import (
    ITERATIONS,
    ClusterRun,
    assert_identical,
    command,
    one_line,
    processes_of,
    run_cluster,
    training,
)
from tests.support.waiting import wait_until

MISUSE = Path(__file__).parent / "scripts" / "misuse.py"
BARE = Path(__file__).parent / "scripts" / "bare.py"


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
        (["--inject", "kill machine=0 iteration=1 point=lunch"], "no point 'lunch', only forward, backward"),
        (["--inject", "kill machine=9 iteration=1"], "there is no machine 9, only machines 0 to 3"),
        (["--resume", "--fresh"], "exclude each other"),
        (["--rdzv-backend", "etcd"], "not supported"),
    ],
)
def test_invalid_flags(flags: list[str], words: str, tmp_path: Path) -> None:
    run = run_cluster(tmp_path, flags=flags)
    assert run.code == 2
    assert words in one_line(run)
    assert not (tmp_path / "store").exists()


def test_missing_script(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, script=["nowhere.py"])
    assert run.code == 2
    assert "nowhere.py" in one_line(run)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("two sessions", "has a session already"),
        ("not attached", "session.attach_fsdp(model) before the first step. Session(snapshot_every=...)"),
        ("no schedule", "takes a schedule"),
        ("no DDP", "takes a torch.nn.parallel.DistributedDataParallel"),
        ("DDP of DTensors", "takes the parameters out of the module in the first forward pass"),
        ("two pipelines", "protects one pipeline"),
        ("without with", "Write `with step:`"),
        ("plain loop", "Write `for step in session.steps(iterations):`"),
        ("gradients carried over", "zero_grad"),
        ("a batch between steps", "Call schedule.step() inside of `with step:`"),
        ("a collective that is waited for after its step", "waits for allreduce, which began in a step"),
        ("a collective that is waited for in the next step", "waits for allreduce, which began in a step"),
        ("validation between steps", "schedule.eval() has no place in the log"),
        ("model left out", "parameter 'weight' is not in Session(state)"),
        ("optimizer left out", "'s parameter 'weight' is not in Session(state)"),
        ("scheduler left out", "StepLR steps with the optimizer and is not in Session(state)"),
        ("DDP model left out", "the DDP model's parameter 'weight' is not in Session(state)"),
        ("DDP optimizer left out", "the DDP model's parameter 'weight' is not in Session(state)"),
    ],
)
def test_misuse_of_a_session(kind: str, words: str, tmp_path: Path) -> None:
    flags = ["--machines", "2", "--spares", "0"]
    run = run_cluster(tmp_path, flags=flags, script=[str(MISUSE), kind, str(tmp_path / "store")])
    assert run.code == 2
    assert words in one_line(run)


def test_what_follows_from_the_misuse_of_another_worker_is_not_told(tmp_path: Path) -> None:
    """The other one waits for it, and its connection breaks."""
    flags = ["--machines", "2", "--spares", "0"]
    script = [str(MISUSE), "two sessions on one worker", str(tmp_path / "store")]
    run = run_cluster(tmp_path, flags=flags, script=script)
    assert run.code == 2
    assert "has a session already" in one_line(run)


# ------------------------------------------------------------------------------------------ old stores


def test_store_of_an_earlier_run(tmp_path: Path, references: Any) -> None:
    """A second run asks: to resume ends with the same weights, --fresh starts over. Foreign segments fail.

    A record that is damaged stops neither.
    """
    first = run_cluster(tmp_path, "--iterations", "6", flags=["--auto-resume"])
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

    record = first.store / "run.json"
    record.write_bytes(record.read_bytes()[:40])  # nothing of it is needed: the run has a copy
    resumed = run_cluster(
        tmp_path, flags=["--auto-resume"], inject="kill machine=3 iteration=7 point=forward microbatch=1"
    )
    assert_identical(resumed, references())
    assert "run.json is damaged" in resumed.output
    assert min(event["iteration"] for event in resumed.events("CheckpointCommitted")) == 6
    assert resumed.recoveries[0]["mode"] == "replay"

    fresh = run_cluster(tmp_path, flags=["--fresh"])
    assert_identical(fresh, references())


def test_the_checkpoint_of_another_model(tmp_path: Path) -> None:
    """It is named at once, with a tensor and both shapes: no other way back would lead anywhere."""
    script = training(tmp_path, iterations=2)
    first = run_cluster(tmp_path, machines=2, script=script)
    assert first.code == 0
    other = run_cluster(tmp_path, machines=2, flags=["--resume"], script=[*script, "--width=48"])
    assert other.code == 2
    line = one_line(other)
    assert "The checkpoint does not fit this model: model." in line
    assert "32" in line.partition(" there and ")[0]
    assert "48" in line.partition(" there and ")[2]
    assert not other.recoveries


def test_a_folder_that_is_not_a_store_of_ours(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("years of work")
    run = run_cluster(tmp_path, flags=["--fresh"])
    assert run.code == 2
    assert "holds no run of swift_ft" in one_line(run)
    assert (tmp_path / "store" / "thesis.tex").exists()


# ------------------------------------------------------------------------------------- torchrun scripts


def test_torchrun_script(tmp_path: Path) -> None:
    """A script without a session runs as under torchrun, and is restarted after a death."""
    run = run_cluster(tmp_path, "die", flags=["--max-restarts", "3"], script=[str(BARE)])
    assert run.code == 0, run.output
    assert run.output.count("sum 6.0") >= 4
    assert run.output.count("attempt 0 of 3") >= 4
    assert run.output.count("attempt 1 of 4") == 4  # a loss uses no restart up
    assert "attempt 2" not in run.output
    assert "all processes were started again once, as torchrun does it" in run.output
    assert "did not end" not in run.output
    (incident,) = run.report["incidents"]
    facts = [incident[name] for name in ("cause", "slots", "way", "times")]
    assert facts == ["signal from outside", [1], "restart", 1]
    assert run.output.count("incident 1 on machine 1 (cause: signal from outside)") == 1


def test_several_workers_on_a_machine(tmp_path: Path) -> None:
    run = run_cluster(
        tmp_path, flags=["--machines", "2", "--spares", "0", "--nproc-per-node", "2"], script=[str(BARE)]
    )
    assert run.code == 0, run.output
    assert "[machine 1 rank 3] sum 6.0" in run.output


def test_a_debugger_in_the_only_worker_reads_what_is_typed(tmp_path: Path) -> None:
    """The worker has the launcher's input, and nothing is said to have failed meanwhile."""
    script = tmp_path / "debugged.py"
    script.write_text("found = 6 * 7\nbreakpoint()\nprint('went on', flush=True)\n")
    flags = "--standalone --machines 1 --nproc-per-node 1 --tee 0 --log-dir /dev/null"
    run = subprocess.run(
        [sys.executable, "-m", "swift_ft.cli.run", *flags.split(), str(script)],
        input="p 'is', found\nc\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "('is', 42)" in run.stdout
    assert "went on" in run.stdout


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
    assert [*(tmp_path / "store" / "log").iterdir()]
    assert not [*(tmp_path / "store" / "log").rglob("*.tmp")]


@pytest.mark.thorough
def test_thawed_machine_does_no_harm(tmp_path: Path, references: Any) -> None:
    """A machine that was frozen and replaced is fenced when it wakes up."""
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
            assert len(frozen) >= 2  # the agent and the worker, and what that machine has just forked
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
    process.stdout.close()
    assert process.wait(timeout=60) == 0, "".join(output[-50:])
    run = ClusterRun(tmp_path, 0, "".join(output), json.loads((tmp_path / "events.json").read_text()))
    assert [r["slots"] for r in run.recoveries] == [[1]]
    assert any(
        event["machine"].endswith(".1") for event in run.events("MachineJoined")
    )  # it has joined again as a spare
    assert_identical(run, references("--iterations", str(iterations)))


def stopped_processes(folder: Path) -> list[int]:
    pids = [int(line.split(":")[0]) for line in processes_of(folder)]
    return [pid for pid in pids if "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()]


# --------------------------------------------------------------------------------------- several hosts


@pytest.mark.thorough
def test_one_launcher_per_host(tmp_path: Path, references: Any) -> None:
    """Started like torchrun, one launcher per machine. The launcher that started the store is replaced.

    Each launcher tells of the loss on its console, and writes the events.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(tmp_path)}
    flags = ["--nnodes", "4", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "hosts"]
    launcher = [sys.executable, "-m", "swift_ft.cli.run", *flags, "--log-dir", str(tmp_path / "logs")]
    script = training(tmp_path, iterations=60)
    events = [tmp_path / f"events{node}.json" for node in range(4)]

    def start(node: int) -> subprocess.Popen[str]:
        with (tmp_path / f"node{node}-{os.urandom(2).hex()}.txt").open("w") as log:
            return subprocess.Popen(
                [*launcher, "--events-out", str(events[node]), "--node-rank", str(node), *script],
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
    reports = [json.loads(path.read_text()) for path in events]
    assert all(report == reports[0] for report in reports)
    assert_identical(ClusterRun(tmp_path, 0, output, reports[0]), references("--iterations", "60"))
    [recovery] = reports[0]["recoveries"]
    for node in range(4):
        told = "".join(path.read_text() for path in tmp_path.glob(f"node{node}-*.txt"))
        assert ("] machine 0 is lost: " in told) == (node != 0)  # the new launcher repeats no history
        assert "all are live, and go on with iteration" in told
        assert (
            f"] 1 recovery, {format_seconds(recovery['live'] - recovery['detected'])}, 0 iterations lost"
            in told
        )
    wait_until(lambda: not processes_of(tmp_path), "the store's end")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.thorough
def test_wrong_number_of_machines(tmp_path: Path) -> None:
    """A launcher with another number of machines is refused; the others continue, and say that they wait."""
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
    with (tmp_path / "first.txt").open("w") as log:
        first = subprocess.Popen(
            [*base, "--nnodes", "2", str(BARE)], env=env, stderr=log, start_new_session=True
        )
    wait_until(lambda: "] waits for " in (tmp_path / "first.txt").read_text(), "the announcement of a wait")
    text = (tmp_path / "first.txt").read_text()
    assert "] waits for 1 of 2 machines to join: 1" in text
    assert "more (--join-timeout 600)" in text
    second = subprocess.run(
        [*base, "--nnodes", "3", str(BARE)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == EXIT_KEPT_OUT
    assert "--nnodes is 3 here and 2 in the job" in second.stderr
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    first.wait(timeout=30)
    for line in processes_of(tmp_path):  # a launcher that was never part of the job leaves the store running
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split(":")[0]), signal.SIGKILL)
    assert ITERATIONS
