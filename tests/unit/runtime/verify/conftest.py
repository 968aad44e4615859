"""A verified step without other workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swift_ft.runtime.verify import part
from swift_ft.torch_core import outputs


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One worker is all workers."""
    monkeypatch.setattr(part, "any_of_all", bool)
    monkeypatch.setattr(part, "texts_of_all", lambda text: [text])
    yield
    outputs.listen("verify", None)
