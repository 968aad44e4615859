"""The runtime of a worker, and the store that it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from swift_ft.config.run_config import RunConfig
from swift_ft.runtime import compose
from swift_ft.storage.store import PATIENCE_S


@pytest.mark.parametrize(
    ("config", "patience_s"),
    [
        (RunConfig(), PATIENCE_S),
        (RunConfig(report_timeout_s=20.0), 16.0),
        (RunConfig(replay_timeout_s=30.0), 24.0),
    ],
)
def test_a_store_is_tried_for_no_longer_than_others_wait(
    config: RunConfig, patience_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "Assembly", assembly := MagicMock())
    context: Any = MagicMock(check="", offline=None, config=config)
    compose.assemble(context, tmp_path, MagicMock(), MagicMock())
    _, store, *_ = assembly.call_args.args
    assert store.patience_s == patience_s
