"""A real training on a real S3 server: log, checkpoints, and the replay of a killed machine."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lib.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedServer
from swift_ft.cli.recover.main import main
from swift_ft.offline.archive import read_journal
from swift_ft.offline.part_comparison import read_part
from swift_ft.offline.run_store import open_run_store
from swift_ft.recovery.entries import entry_from_dict
from swift_ft.recovery.job_state import Phase, SavedPart
from swift_ft.storage.store import Store
from tests.support.cluster import ClusterRun, recover, training
from tests.support.training import replayed_from


def archive_of(url: str) -> tuple[Store, str]:
    opened = open_run_store(url)
    return opened.store, opened.run_id


def replay_without_the_job(url: str, run: ClusterRun, folder: Path) -> None:
    """What is rebuilt from the store alone is what the machine had at the end."""
    out = folder / "rebuilt"
    where = ["--machine", "1", "--out", str(out)]
    done = recover("replay", url, *where, "--", *training(folder / "nowhere"))
    assert "8 iterations completed" in done.stdout, done.stderr
    rebuilt = read_part(Store(out), SavedPart("rank-00001", ""))
    weights = torch.load(run.folder / "weights" / "rank1.pt", weights_only=True)
    assert weights
    assert all(torch.equal(rebuilt[f"models.model.{name}"], weights[name]) for name in weights)


def test_a_killed_machine_is_replayed_from_s3(
    seaweed: SeaweedServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, Any] = {}
    name = uuid.uuid4().hex
    url = f"s3://{BUCKET}/{name}"
    run = replayed_from(url, tmp_path, machine=1, at="point=forward microbatch=3", helpers=2)
    (recovery,) = run.recoveries
    assert recovery["helpers"] == [0, 2]
    for rank in ("0", "1", "2"):  # helpers, too
        assert recovery["from_peers"][rank] > 0  # the survivors' own disks
        assert recovery["from_store"][rank] == 0
    found = read_journal(*archive_of(url))  # without what agents may append after the job's end
    assert [*found.entries] == [*map(entry_from_dict, run.report["events"])][: len(found.entries)]
    assert found.last_state().phase == Phase.ENDED
    bundle, page = tmp_path / "report.tar.gz", tmp_path / "report.html"
    verbs = (["status"], ["plan", "--fail", "2"], ["export", "--out", str(bundle)])
    for verb in (*verbs, ["timeline", "--plot", str(page)]):
        capfd.readouterr()
        assert main([verb[0], url, *verb[1:], "--json"]) == 0
        answers[verb[0]] = json.loads(capfd.readouterr().out)
    assert answers["status"]["phase"] == "ended"
    assert answers["status"]["checkpoint_age_s"] < 3600
    assert answers["plan"]["mode"] == "replay"
    assert answers["export"]["entries"] == len(found.entries)
    assert (answers["timeline"]["problems"], answers["timeline"]["unknown"]) == ([], [])
    assert [worker["iteration"] for worker in answers["timeline"]["totals"]] == [8] * 4
    assert url in page.read_text()
    client = seaweed.client()
    files = client.find(f"{BUCKET}/{name}")
    replay_without_the_job(url, run, tmp_path)
    assert client.find(f"{BUCKET}/{name}") == files
    assert any(file.endswith("/committed.json") for file in files)
    assert not [file for file in files if ".tmp" in file]
    # Credentials are where all tools look for them, and nowhere else: neither here nor in the store.
    logs = [run.folder / "events.json", *(run.folder / "logs").rglob("*.log")]
    shown = [run.output.encode(), *(path.read_bytes() for path in logs), *map(client.cat_file, files)]
    for secret in (SECRET_KEY, ACCESS_KEY):
        assert not any(secret.encode() in content for content in shown)
