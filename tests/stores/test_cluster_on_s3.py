"""A real training on a real S3 server: log, checkpoints, and the replay of a killed machine."""

from __future__ import annotations

import uuid
from pathlib import Path

from harness import assert_identical, run_cluster
from seaweed import BUCKET, SECRET_KEY, SeaweedServer


def test_a_killed_machine_is_replayed_from_s3(seaweed: SeaweedServer, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    url = f"s3://{BUCKET}/{name}"
    reference = run_cluster(tmp_path / "undisturbed")
    run = run_cluster(
        tmp_path / "killed", "--store", url, inject="kill machine=1 iteration=5 point=forward microbatch=3"
    )
    assert_identical(run, reference)
    (recovery,) = run.recoveries
    assert recovery["way"] == "replay"
    assert recovery["slots"] == [1]
    files = seaweed.client().find(f"{BUCKET}/{name}")
    assert any(file.endswith("/committed.json") for file in files)
    assert not [file for file in files if ".tmp" in file]
    shown = run.output + (run.folder / "events.json").read_text()
    shown += "".join(path.read_text() for path in (run.folder / "logs").rglob("*.log"))
    assert SECRET_KEY not in shown
