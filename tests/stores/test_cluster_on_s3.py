"""A real training on a real S3 server: log, checkpoints, and the replay of a killed machine."""

from __future__ import annotations

import uuid
from pathlib import Path

from seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedServer
from training import replayed_from


def test_a_killed_machine_is_replayed_from_s3(seaweed: SeaweedServer, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    url = f"s3://{BUCKET}/{name}"
    run = replayed_from(url, tmp_path, machine=1, at="point=forward microbatch=3", helpers=2)
    (recovery,) = run.recoveries
    assert recovery["helpers"] == [0, 2]
    for rank in ("0", "1", "2"):  # helpers, too
        assert recovery["from_peers"][rank] > 0  # the survivors' own disks
        assert recovery["from_store"][rank] == 0
    client = seaweed.client()
    files = client.find(f"{BUCKET}/{name}")
    assert any(file.endswith("/committed.json") for file in files)
    assert not [file for file in files if ".tmp" in file]
    # Credentials are where all tools look for them, and nowhere else: neither here nor in the store.
    logs = [run.folder / "events.json", *(run.folder / "logs").rglob("*.log")]
    shown = [run.output.encode(), *(path.read_bytes() for path in logs), *map(client.cat_file, files)]
    for secret in (SECRET_KEY, ACCESS_KEY):
        assert not any(secret.encode() in content for content in shown)
