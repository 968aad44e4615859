"""DDP on a GPU, over gloo, which averages gradients through the host: the state comes from a replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import BACKEND


@pytest.mark.parametrize("point", ["point=reducing bucket=0", "point=optimizer"])
def test_a_kill(point: str, tmp_path: Path, gpu: OnOneGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND, raising=False)
    gpu.check_kill(tmp_path, "train_ddp", f"machine=1 iteration=5 {point}", "--backend", "gloo")
