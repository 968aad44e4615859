"""A real training on a real S3 server: log, checkpoints, and the replay of a killed machine."""

from __future__ import annotations

import uuid
from pathlib import Path

from seaweed import BUCKET, SECRET_KEY, SeaweedServer
from training import replayed_from


def test_a_killed_machine_is_replayed_from_s3(seaweed: SeaweedServer, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    url = f"s3://{BUCKET}/{name}"
    run = replayed_from(url, tmp_path, machine=1, at="point=forward microbatch=3")
    files = seaweed.client().find(f"{BUCKET}/{name}")
    assert any(file.endswith("/committed.json") for file in files)
    assert not [file for file in files if ".tmp" in file]
    shown = run.output + (run.folder / "events.json").read_text()
    shown += "".join(path.read_text() for path in (run.folder / "logs").rglob("*.log"))
    assert SECRET_KEY not in shown
