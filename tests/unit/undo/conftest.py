from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swift_ft.undo import copies


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def copied_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What ``exact`` may copy. Nothing, as a rule: the parameters of these tests are small.

    Tests with the mark ``BOTH_WAYS`` (`tests/support/optimizers.py`) run with copies as well.
    """
    limit: int = getattr(request, "param", 0)
    monkeypatch.setattr(copies, "COPIED_BYTES", limit)
    return limit
