"""Under plain torchrun, the state is that of the checkpoint which it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swift_ft.checkpoint.state_values import digests_of
from swift_ft.testing.chaos import plain
from swift_ft.testing.chaos.plain import PlainSession


@pytest.mark.parametrize("epochs", [False, True])
@pytest.mark.parametrize("at", [0, 3, 4, 6])
def test_the_state_is_of_the_iteration_that_was_asked_for(
    at: int, epochs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plain.STATES, str(tmp_path))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    found = {}
    for asked in (at, 6):
        monkeypatch.setenv(plain.AT, str(asked))
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        session = PlainSession({"model": model})
        for _ in session.epochs(2) if epochs else [0]:
            if session.iteration:
                torch.manual_seed(1)  # the lines at the top of an epoch come after its checkpoint
            for _ in session.steps(3 if epochs else 6):
                with torch.no_grad():
                    model.weight.add_(1)
        own = tmp_path / "0.json"
        found[asked] = json.loads(own.read_text())["worker 0.models.model.weight"]
        own.unlink()
    assert (found[at] == found[6]) == (at == 6)
    expected = digests_of(torch.full((1, 1), float(at)), "weight")["weight"]
    assert found[at] == expected
