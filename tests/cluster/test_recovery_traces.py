"""What each process does in a recovery is recorded, from the loss to the first iteration; nothing else is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from swift_ft.checkpoint.run_record import RECORD
from swift_ft.checkpoint.worker_files import WorkerFiles, of_rank
from swift_ft.checkpoint.worker_history import WorkerHistory
from swift_ft.observe.spans import FIRST_ITERATION
from swift_ft.storage.store import Store
from tests.support.cluster import EXAMPLES, ClusterRun, assert_identical, recover, run_cluster, training
from tests.support.trace_events import assert_is_trace

KILL = "kill machine=1 iteration=5 point=forward"
KILL_REPLICA = "kill machine=1 iteration=5 point=reduce"
AGAIN = "kill machine=1 iteration=4 point=replay"
ALONE = ["--helpers", "0"]  # else a helper may be the last one, and the path names it
SAYS = Path(__file__).parent / "scripts" / "says_what_it_recorded.py"
REPLICAS = EXAMPLES / "train_ddp.py"

CLOSE = 0.1
"""Milliseconds: as close as a process can read its two clocks."""

GOES_LIVE = ("go live", "connect", FIRST_ITERATION, "first collective")
SURVIVES = ("wake", "report", "seal the log", "append", "wait until all are ready", *GOES_LIVE)
REPLACES = (
    *("be forked", "script before its session", "make the session", "join the job", "report"),
    *("wait until all are ready", *GOES_LIVE),
)
REPLAYS = ("load", "open own log", "open logs", "replay", "replay an iteration")


def of(trace: dict[str, Any], by: str) -> dict[str, list[tuple[float, float]]]:
    """The spans of a participant, by name: when each began and ended, in milliseconds since the loss."""
    (found,) = (one for one in trace["participants"] if one["by"] == by)
    spans: dict[str, list[tuple[float, float]]] = {}
    for span in found["spans"]:
        spans.setdefault(span["name"], []).append((span["began_ms"], span["began_ms"] + span["ms"]))
    return spans


def assert_in_order(spans: dict[str, list[tuple[float, float]]], names: Iterable[str]) -> None:
    """Each of them begins once the one before has ended, the last time that they happened."""
    ended = -1e9
    for name in names:
        begin, end = spans[name][-1]
        assert begin >= ended - 0.001, (name, begin, ended)
        ended = end


def assert_whole(run: ClusterRun, replaced: int, machines: int) -> dict[str, Any]:
    """What holds for every recovery in which a spare takes over, and all processes live on."""
    assert run.code == 0, run.output[-3000:]
    (recovery,) = run.recoveries
    trace: dict[str, Any] = recovery["trace"]
    assert (trace["missing"], trace["generation"]) == ([], recovery["generation"])
    assert trace["zero"] == pytest.approx(recovery["detected"], abs=0.01)
    by = [one["by"] for one in trace["participants"]]
    assert by[:machines] == [f"worker {rank}" for rank in range(machines)]
    assert {name.split()[0] for name in by[machines:]} == {"agent"}
    # The loss was known before the journal had it, and nothing else was recorded before.
    detected = min(of(trace, name)["detect"][0][0] for name in by[machines:] if "detect" in of(trace, name))
    killed = 1000 * (run.events("FaultInjected")[-1]["at"] - trace["zero"])
    assert killed <= detected <= CLOSE
    for one in trace["participants"]:
        assert one["uncertainty_ms"] == 0  # one host, one clock
        for span in one["spans"]:
            assert killed <= one["began_ms"] <= span["began_ms"]
            assert span["began_ms"] + span["ms"] <= one["ended_ms"] + CLOSE
    # A worker does not report before the loss, nor train before all are ready.
    ready = max(of(trace, f"worker {rank}")["wait until all are ready"][-1][1] for rank in range(machines))
    for rank in range(machines):
        spans = of(trace, f"worker {rank}")
        names = REPLACES if rank == replaced else SURVIVES
        assert {*names} <= spans.keys(), rank
        # Who is an iteration behind when the loss is known completes it, and tears nothing down.
        assert ("tear down" in spans) == (rank != replaced and was_interrupted(run, rank)), rank
        assert_in_order(spans, ("report", "wait until all are ready", "go live", FIRST_ITERATION))
        live = spans["go live"][-1]
        assert all(live[0] <= begin <= end <= live[1] for begin, end in [spans["connect"][-1]])
        assert spans["first collective"][-1][0] >= spans[FIRST_ITERATION][-1][0]
    assert_in_order(of(trace, f"worker {replaced}"), [n for n in REPLACES[:5] if n != "report"])
    (agent,) = (name for name in by[machines:] if "start workers" in of(trace, name))
    started = of(trace, agent)["start workers"][0][0]
    forked = of(trace, f"worker {replaced}")["be forked"][0][0]
    assert 0 <= started <= forked <= ready
    assert_path(trace, killed)
    assert all(part["name"] in recovery["path"] for part in trace["path"])
    return trace


def was_interrupted(run: ClusterRun, rank: int) -> bool:
    """Whether a worker's first process says that the loss interrupted an iteration of it."""
    store = Store(str(run.store))
    record = store.read_json(RECORD)
    assert record is not None
    files = WorkerFiles(store, record["run_id"])
    (first, *_) = files.read(WorkerHistory, of_rank(rank, "g0001")).generations
    return first.interrupted is not None


def assert_path(trace: dict[str, Any], killed: float) -> None:
    """Its parts follow on one another, from the kill to the last first iteration."""
    path = trace["path"]
    names = [part["name"] for part in path]
    order = ["detect", "report", "rebuild", "gather", "connect", "go live", "first iteration"]
    assert [name for name in order if name in names] == names
    assert {"detect", "report", "first iteration"} <= {*names}
    assert path[0]["began_ms"] == pytest.approx(killed, abs=0.001)
    for before, after in itertools.pairwise(path):
        assert after["began_ms"] == pytest.approx(before["began_ms"] + before["ms"], abs=0.001)
    ended = max(one["ended_ms"] for one in trace["participants"])
    assert path[-1]["began_ms"] + path[-1]["ms"] <= ended
    for part in path:
        assert sum(part["spans"].values()) <= part["ms"] + 0.01, part  # what is left, nobody has a name for


def test_a_stage_is_replayed(tmp_path: Path, references: Any) -> None:
    run = run_cluster(tmp_path / "killed", inject=KILL, flags=ALONE)
    trace = assert_whole(run, 1, 4)
    spans = of(trace, "worker 1")
    assert {*REPLAYS} <= spans.keys()
    assert_in_order(spans, ("report", "load", "open logs", "replay", "connect"))
    (replay,) = spans["replay"]
    assert len(spans["replay an iteration"]) == 2
    assert all(replay[0] <= begin <= end <= replay[1] for begin, end in spans["replay an iteration"])
    for rank in (0, 2, 3):
        assert not {*REPLAYS} - {"open own log"} & of(trace, f"worker {rank}").keys()
    (rebuild,) = (part for part in trace["path"] if part["name"] == "rebuild")
    assert rebuild["by"] == "worker 1"
    assert {"load", "open logs", "replay an iteration"} <= rebuild["spans"].keys()

    shown = recover("timeline", str(run.store), "--trace", str(tmp_path / "trace.json"))
    assert shown.returncode == 0, shown.stderr
    assert f"recovery 1 waited for: {run.recoveries[0]['path']}" in shown.stdout
    content = json.loads((tmp_path / "trace.json").read_text())
    assert_is_trace(content)
    shown_spans = [event["name"] for event in content["traceEvents"] if event["ph"] == "X"]
    known = [span["name"] for one in trace["participants"] for span in one["spans"]]
    assert sorted(shown_spans) == sorted([*known, *(part["name"] for part in trace["path"])])
    assert_identical(run, references())


def test_a_replica_gives_its_state(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, inject=KILL_REPLICA, machines=3, script=training(tmp_path, REPLICAS))
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"]
    trace = assert_whole(run, 1, 3)
    for rank in range(3):
        assert_in_order(of(trace, f"worker {rank}"), ("connect", "make replicas equal", FIRST_ITERATION))


def test_a_replacement_that_is_lost_takes_its_spans_with_it(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, inject=f"{KILL}; {AGAIN}", flags=[*ALONE, "--spares", "2"])
    assert run.code == 0, run.output[-3000:]
    (recovery,) = run.recoveries
    assert recovery["slots"] == [1, 1]
    trace = recovery["trace"]
    assert trace["missing"] == []
    second = 1000 * (run.events("MachineLost")[1]["at"] - trace["zero"])
    (replaced,) = (one for one in trace["participants"] if one["by"] == "worker 1")
    assert replaced["began_ms"] >= second
    assert {*REPLACES, *REPLAYS} <= of(trace, "worker 1").keys()
    for rank in (0, 2, 3):
        spans = of(trace, f"worker {rank}")
        assert len(spans["report"]) == 2
        assert second < spans["report"][1][0]
        assert {*SURVIVES} <= spans.keys()


@pytest.mark.parametrize("script", [EXAMPLES / "train_swift.py", REPLICAS], ids=["a pipeline", "replicas"])
def test_without_a_loss_nothing_is_recorded_and_nothing_written(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPT", str(script))
    run = run_cluster(tmp_path, machines=2, script=training(tmp_path, SAYS))
    assert run.code == 0, run.output[-3000:]
    assert [(tmp_path / f"recordings{rank}.txt").read_text() for rank in range(2)] == ["0", "0"]
    assert not [*run.store.rglob("*.trace.json")]
    assert not run.recoveries
