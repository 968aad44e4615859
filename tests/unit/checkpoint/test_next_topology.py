"""Which shapes of a job can take over another one's state while it runs."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from swift_ft.checkpoint.store_claim import check_next_world, note_topology
from swift_ft.errors import TopologyMismatchError
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

ONE: dict[str, Any] = {"machines": 2, "workers": 1, "stages": 1}
PIPELINE: dict[str, Any] = {**ONE, "stages": 2}
LAYERS: dict[str, Any] = {**PIPELINE, "layers": 10, "pipelines": 1, "redealt": False}
MORE = {"machines": 3}
STAGES = {"machines": 4, "stages": 4}


def noted(topology: dict[str, Any]) -> RendezvousStore:
    rendezvous = RendezvousStore(HashStore)
    note_topology(rendezvous, topology)
    return rendezvous


@pytest.mark.parametrize(
    ("present", "then"),
    [
        (PIPELINE, PIPELINE),
        (LAYERS, {**LAYERS, **STAGES}),
        ({**LAYERS, "redealt": True}, {**LAYERS, "redealt": True, **STAGES, "pipelines": 2}),
        ({**ONE, "sharded": True}, {**ONE, **MORE, "sharded": True}),
        ({**PIPELINE, "sharded": True}, {**PIPELINE, **STAGES, "sharded": True}),
        ({**ONE, "redealt": True}, {**ONE, **MORE, "redealt": True}),
    ],
)
def test_takes_over(present: dict[str, Any], then: dict[str, Any]) -> None:
    check_next_world(noted(present), then)


@pytest.mark.parametrize(
    ("present", "then", "why"),
    [
        (PIPELINE, {**PIPELINE, **STAGES}, r"machines 2 there, 4 here; stages 2 there, 4 here\).$"),
        (LAYERS, {**LAYERS, "layers": 12}, "layers 10 there, 12 here"),
        (LAYERS, {**LAYERS, **STAGES, "pipelines": 2}, "pipelines 1 there, 2 here.*GlobalBatches"),
        ({**ONE, "redealt": False}, {**ONE, **MORE, "redealt": False}, "2 there, 3 here.*GlobalBatches"),
        ({**ONE, "redealt": False}, {**ONE, **MORE, "redealt": True}, "2 there, 3 here.*GlobalBatches"),
    ],
)
def test_is_refused(present: dict[str, Any], then: dict[str, Any], why: str) -> None:
    with pytest.raises(TopologyMismatchError, match=why) as refused:
        check_next_world(noted(present), then)
    assert "\n" not in str(refused.value)


def test_nothing_has_trained_yet() -> None:
    check_next_world(RendezvousStore(HashStore), PIPELINE)
