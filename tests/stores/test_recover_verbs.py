"""The verbs of ``swift-recover`` that only look, on real S3 and HDFS, after runs that lost a machine."""

from __future__ import annotations

import json
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch

from benchmarks.lib.seaweed import BUCKET
from swift_ft.cli.recover.main import main
from swift_ft.offline.part_comparison import read_part
from swift_ft.recovery.entries import entry_from_dict
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.files import FileFacts
from swift_ft.storage.store import Store
from tests.support.cluster import ClusterRun, recover, run_cluster, training

CHECKPOINT, LENGTH, LOST = 6, 11, 1


@dataclass(frozen=True)
class Made:
    """A run that is over, and where its store is."""

    url: str
    run: ClusterRun

    def files(self) -> dict[str, FileFacts]:
        """All that is in the store, and when it was written."""
        return Store(self.url).find("")


@pytest.fixture(scope="module", params=["s3", "hdfs"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Machine 1 dies in iteration 8, and is replayed from the checkpoint of iteration 6."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "s3":
            s3fs.S3FileSystem.clear_instance_cache()
            for name, value in request.getfixturevalue("seaweed_running").environment.items():
                patch.setenv(name, value)
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        else:
            url = f"{request.getfixturevalue('hdfs').url}/{uuid.uuid4().hex}"
        folder = tmp_path_factory.mktemp(request.param)
        run = run_cluster(
            folder,
            *("--store", url, f"--iterations={LENGTH}", f"--checkpoint-every={CHECKPOINT}"),
            inject=f"kill machine={LOST} iteration=8 point=forward microbatch=3",
            script=training(folder),
        )
        assert run.code == 0, run.output[-3000:]
        assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
        yield Made(url, run)


@pytest.fixture(autouse=True)
def _unchanged(made: Made) -> Iterator[None]:
    before = made.files()
    yield
    assert made.files() == before


def answer(capfd: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    capfd.readouterr()
    assert main([*command, "--json"]) == 0
    return dict(json.loads(capfd.readouterr().out))


def test_status(made: Made, capfd: pytest.CaptureFixture[str]) -> None:
    status = answer(capfd, "status", made.url)
    assert (status["phase"], status["ok"], status["generation"], status["recoveries"]) == (
        "ended",
        True,
        2,
        1,
    )
    assert (status["checkpoints"], status["checkpoint_every"]) == ([0, CHECKPOINT], CHECKPOINT)
    sizes = {path: facts.size for path, facts in made.files().items()}
    assert status["log_bytes"] == sum(size for path, size in sizes.items() if path.startswith("log/")) > 0
    assert 0 <= status["checkpoint_age_s"] < 3600
    assert status["problems"] == []
    for machine in status["machines"]:
        (log,) = machine["logs"]
        assert log["coverage"]["gaps"] == []
        assert log["coverage"]["spans"][0][0] == CHECKPOINT


def test_plan(made: Made, capfd: pytest.CaptureFixture[str]) -> None:
    """As of the last moment in which all workers trained: a checkpoint may be committed later."""
    plan = answer(capfd, "plan", made.url, "--fail", "2", "--iteration", "9")
    assert (plan["outcome"], plan["mode"]) == ("recovers", "replay")
    assert plan["committed"] in (0, CHECKPOINT)
    replays = {worker["rank"]: worker["replays"] for worker in plan["workers"] if worker["replays"]}
    assert replays == {2: 9 - plan["committed"]}


def test_verify(made: Made, capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(capfd, "verify", made.url)
    assert found["findings"] == []
    assert [(one["iteration"], one["intact"]) for one in found["checkpoints"]] == [
        (0, True),
        (CHECKPOINT, True),
    ]
    assert [worker["until"] for worker in found["workers"]] == [LENGTH] * 4


def test_inspect(made: Made, capfd: pytest.CaptureFixture[str]) -> None:
    paths = [path for path in made.files() if path.startswith("log/rank-00003/") and path.endswith(".arrow")]
    summary = answer(capfd, "inspect", f"{made.url}/{max(paths)}")
    assert (summary["rank"], summary["damage"]) == (3, [])
    assert summary["size_bytes"] == made.files()[max(paths)].size
    sent = [boundary for boundary in summary["boundaries"] if boundary["messages"]]
    assert [(one["source_stage"], one["destination_stage"], one["direction"]) for one in sent] == [
        (3, 2, "backward")
    ]
    iterations = summary["iterations"][1] - summary["iterations"][0] + 1
    assert sent[0]["messages"] == 8 * iterations


def test_export(made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = answer(capfd, "export", made.url, "--out", str(tmp_path / "report.tar.gz"))
    assert bundle["problems"] == []
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        texts = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    entries = [json.loads(line) for line in texts["journal.jsonl"].splitlines()]
    expected = [entry_from_dict(event) for event in made.run.report["events"]]
    assert [entry_from_dict(entry) for entry in entries] == expected[: len(entries)]
    assert json.loads(texts["recoveries.json"])[0]["slots"] == [LOST]
    assert json.loads(texts["files.json"]).keys() == made.files().keys()


def test_gc_shows_and_deletes_nothing(made: Made, capfd: pytest.CaptureFixture[str]) -> None:
    report = answer(capfd, "gc", made.url, "--dry-run")
    assert (report["deleted"], report["may_be_alive"]) == (False, "")
    assert report["store_bytes"] == sum(facts.size for facts in made.files().values())
    kept = [one["path"] for one in report["garbage"] if "checkpoints/" in one["path"]]
    assert kept == []


def test_replay(made: Made, tmp_path: Path) -> None:
    """What is rebuilt from the store alone is what the machine had at the end."""
    out = tmp_path / "rebuilt"
    script = training(tmp_path / "nowhere")
    done = recover("replay", made.url, "--machine", str(LOST), "--out", str(out), "--", *script)
    assert f"{LENGTH} iterations completed" in done.stdout, done.stderr
    rebuilt = read_part(Store(out), SavedPart(f"rank-{LOST:05d}", ""))
    weights = torch.load(made.run.folder / "weights" / f"rank{LOST}.pt", weights_only=True)
    assert weights
    assert all(torch.equal(rebuilt[f"models.model.{name}"], weights[name]) for name in weights)
