"""Samples in files on a real S3 server: read from there once, then from each other, and each in its turn."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch

from benchmarks.lib.seaweed import BUCKET, SeaweedServer
from swift_ft.data import samples_by_iteration, write_index
from swift_ft.data.order import SampleOrder
from swift_ft.storage.store import Store
from tests.support.cluster import run_cluster, training

SCRIPT = Path(__file__).parents[1] / "cluster" / "scripts" / "sees_samples.py"
FILES, IN_EACH, BATCH, MACHINES = 12, 50, 10, 3
SAMPLES = FILES * IN_EACH


def test_each_sample_once_from_files_on_s3(
    seaweed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    store = Store(url)
    for number in range(FILES):
        lines = tmp_path / "lines"
        lines.write_text("".join(f"{number * IN_EACH + n:06}\n" for n in range(IN_EACH)))
        store.upload(lines, f"part-{number:02}.txt")
    index = write_index(url)
    size = sum(file.content.size for file in index.files)
    settings = {
        "SAMPLES": SAMPLES,
        "BATCH": BATCH,
        "LOADERS": 1,
        "UNLIKE": 0,
        "SAMPLE_LOG": tmp_path / "log",
        "FILES": url,
        "COPIES": tmp_path / "copies",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    found = run_cluster(
        tmp_path,
        machines=MACHINES,
        inject="kill machine=1 iteration=20 point=reduced",
        script=training(tmp_path, SCRIPT, iterations=SAMPLES // BATCH),
    )
    assert found.code == 0, found.output[-3000:]
    assert len(found.recoveries) == 1
    order = SampleOrder([IN_EACH] * FILES, shuffle=True, seed=5).at(0, SAMPLES)
    seen = samples_by_iteration(tmp_path / "log")
    assert [sample for iteration in sorted(seen) for sample in seen[iteration]] == order
    expected = torch.empty(SAMPLES, dtype=torch.float64)
    expected[torch.tensor(order)] = torch.arange(SAMPLES, dtype=torch.float64)
    for rank in range(MACHINES):
        weights = torch.load(tmp_path / "weights" / f"rank{rank}.pt", weights_only=True)
        assert torch.equal(weights["times"], torch.ones(SAMPLES, dtype=torch.float64))
        assert torch.equal(weights["place"], expected)
    fetched = [json.loads((tmp_path / "weights" / f"fetched{n}.json").read_text()) for n in range(MACHINES)]
    assert sum(one["peers"] for one in fetched) >= size  # nearly all but the first reader's
    assert sum(one["store"] for one in fetched) < 2 * size
