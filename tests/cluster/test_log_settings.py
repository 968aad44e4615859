"""Budgets, tiers, packing and metrics of the log, in real trainings."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.ports import free_port
from swift_ft.costs.chain_profile import read_profile
from swift_ft.costs.layer_profile import read_layers
from swift_ft.planning.grouping.groups import plan_groups
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.templates import templates_for
from tests.support.cluster import ClusterRun, assert_clean, assert_identical, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "session_settings.py"
MIB = 1 << 20
MESSAGE_BYTES = 32 * 32 * 4  # sequence x width x float32, of one microbatch


def run_with(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *args: str,
    session: dict[str, Any],
    inject: str = "",
    flags: list[str] | None = None,
) -> ClusterRun:
    monkeypatch.setenv("SESSION", json.dumps(session))
    return run_cluster(folder, *args, inject=inject, script=training(folder, SCRIPT), flags=flags)


def metrics_of(run: ClusterRun, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / f"metrics{rank}.jsonl").read_text().splitlines()]


def log_bytes(run: ClusterRun, rank: int) -> int:
    return sum(path.stat().st_size for path in (run.store / f"log/rank-{rank:05d}").iterdir())


@pytest.mark.thorough
def test_a_checkpoint_is_taken_before_the_disk_budget_is_used_up(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regular checkpoints are far apart. A machine dies after an early one, and is replayed from there.

    It dies between two of them, which are in iterations 11 and 22: a loss before a commit lifts the budget.
    """
    length = ["--iterations=26", "--checkpoint-every=1000"]
    run = run_with(
        tmp_path,
        monkeypatch,
        *length,
        session={"disk_bytes": MIB},
        inject="kill machine=1 iteration=17 point=backward microbatch=2",
    )
    assert_identical(run, references(*length))
    assert_clean(run)
    assert run.events("CheckpointRequested")
    early = [event["iteration"] for event in run.events("CheckpointCommitted") if event["iteration"] > 0]
    assert early
    assert min(early) < 17
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    for rank in range(4):
        used = [line["log"]["written"]["disk_bytes"] for line in metrics_of(run, rank)]
        assert max(used) <= MIB
        assert log_bytes(run, rank) <= MIB
        assert all(line["log"]["disk_budget_bytes"] == MIB for line in metrics_of(run, rank))


def test_a_budget_too_small_for_any_checkpoint_ends_the_job_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, monkeypatch, "--sequence=512", session={"disk_bytes": MIB})
    assert run.code == 2
    assert "log_budget_bytes leaves this worker's log 1048576 bytes of disk" in run.output
    assert "Traceback" not in run.output


def test_on_failure_packed_segments_come_from_the_local_tier(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tmp_path / "tier"
    run = run_with(
        tmp_path / "run",
        monkeypatch,
        session={"ship": "on-failure", "local": str(tier), "compress": "always"},
        inject="kill machine=2 iteration=5 point=forward microbatch=3",
    )
    assert_identical(run, references())
    assert_clean(run)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    assert not list(tier.rglob("*.arrow"))  # the folders are removed at the end
    for rank in range(4):
        lines = metrics_of(run, rank)
        assert lines[-1]["log"]["packing"]
        before = [line for line in lines if line["generation"] == 1]
        assert all(line["log"]["store_bytes_per_s"] is None for line in before)  # nothing was shipped
        shipped = lines[-1]["log"]["store_bytes_per_s"]
        assert shipped is None if rank == 2 else shipped > 0  # the replacement logged nothing before the loss


def test_metrics_say_what_every_iteration_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of the formula in §5.4: all messages between machines, to the byte."""
    port = free_port(in_a_row=4)
    run = run_with(tmp_path, monkeypatch, session={}, flags=["--worker-metrics-port", str(port)])
    assert run.code == 0, run.output[-3000:]
    for rank in range(4):
        neighbours = 1 if rank in (0, 3) else 2
        lines = metrics_of(run, rank)
        assert [line["iteration"] for line in lines] == list(range(9))
        for line in lines[1:]:
            assert line["log"]["last"]["messages"] == 8 * neighbours
            assert line["log"]["last"]["bytes"] == 8 * neighbours * MESSAGE_BYTES
            assert line["log"]["last"]["copied_in_bubbles_s"] == 0.0
            assert line["log"]["last"]["bubble_s"] > 0
        last = lines[-1]
        assert last["log"]["total"]["bytes"] == 8 * 8 * neighbours * MESSAGE_BYTES
        assert last["log"]["written"]["bytes"] > last["log"]["total"]["bytes"]
        assert last["committed"] == 6
        assert not last["replaying"]
        scraped = (run.folder / f"scrape{rank}.txt").read_text()
        expected = [
            f'swift_ft_iteration{{rank="{rank}"}} 8.0',
            f'swift_ft_log_bytes_total{{rank="{rank}"}} {float(last["log"]["total"]["bytes"])}',
            f'swift_ft_recoveries_total{{rank="{rank}"}} 0.0',
            f'swift_ft_log_held_back_seconds_total{{rank="{rank}"}} 0.0',
        ]
        assert [line for line in expected if line not in scraped] == []


def test_a_port_in_use_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        script = [str(Path(SCRIPT).parents[3] / "examples" / "train_swift.py")]
        run = run_cluster(
            tmp_path,
            *training(tmp_path)[1:],
            machines=1,
            flags=["--worker-metrics-port", str(port), "--nproc-per-node", "2"],
            script=script,
        )
    assert run.code == 0, run.output[-3000:]
    assert "serves no metrics" in run.output


def test_a_profile_for_the_planner(tmp_path: Path) -> None:
    """`swift-run --profile-out` writes what `swift-group` reads: seconds per machine, bytes per boundary."""
    path = tmp_path / "profile.json"
    run = run_cluster(tmp_path / "run", flags=["--profile-out", str(path)])
    assert run.code == 0, run.output[-3000:]
    profile = read_profile(path)
    assert profile.boundary_bytes == (2 * 8 * MESSAGE_BYTES,) * 3  # both directions, eight microbatches
    assert len(profile.compute_s) == 4
    assert all(0 < seconds < 60 for seconds in profile.compute_s)
    plan = plan_groups(profile, budget_bytes=10**7, checkpoint_interval=10, bandwidth=1e9)
    assert plan.log_bytes <= 10**7


def test_the_costs_of_layers_are_measured_through_a_loss(tmp_path: Path, references: Any) -> None:
    """`swift-run --layers-out` writes what `swift-plan` reads. A machine dies while layers are measured.

    Its replacement has published its own before its last iteration, and so before worker 0 ends its last one.
    """
    path = tmp_path / "layers.json"
    run = run_cluster(
        tmp_path / "run",
        flags=["--layers-out", str(path)],
        inject="kill machine=1 iteration=2 point=backward microbatch=2",
    )
    assert_identical(run, references())
    assert_clean(run)
    layers = read_layers(path)
    stages = [int(layer.name.partition(".")[0]) for layer in layers]
    assert stages == sorted(stages)
    assert set(stages) == {0, 1, 2, 3}
    assert all(layer.forward_ns and layer.backward_ns and layer.state_bytes for layer in layers)
    found = templates_for(StageCosts(layers), [2, 3])
    assert all(template.iteration_ns > 0 for template in found)


def test_a_profile_of_machines_with_two_workers(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    flags = ["--profile-out", str(path), "--nproc-per-node", "2"]
    run = run_cluster(tmp_path / "run", machines=2, flags=flags)
    assert run.code == 0, run.output[-3000:]
    assert read_profile(path).boundary_bytes == (2 * 8 * MESSAGE_BYTES,)


def test_a_job_that_is_no_chain_trains_without_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run = run_cluster(tmp_path / "run", "--schedule=Interleaved1F1B", flags=["--profile-out", str(path)])
    assert run.code == 0, run.output[-3000:]
    assert not path.exists()
    assert "The profile was not written" in run.output
    assert "are not neighbours" in run.output
