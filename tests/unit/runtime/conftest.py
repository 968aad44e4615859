"""What the tests of a worker's runtime share."""

from __future__ import annotations

import pytest

from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.lasting_work import LastingWork


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> AbortableWaits:
    """Over NCCL, within a step."""
    waits = AbortableWaits()
    waits.silent = True
    waits.begun()
    monkeypatch.setattr(LastingWork, "waits", waits)
    return waits
