"""Which shapes of a job can take over another one's state while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from swift_ft.checkpoint.run_record import read_record, write_record
from swift_ft.checkpoint.store_claim import check_next_world, keep_topology, note_topology
from swift_ft.errors import TopologyMismatchError
from swift_ft.storage.store import Store
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


def test_a_resumed_run_finds_the_shape_of_the_last_world(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_record(store, {"run_id": "a run", "topology": PIPELINE, "earlier": ["another"], "settings": {}})
    keep_topology(store, "a run", ONE)
    found = read_record(store)
    assert found is not None
    assert (found["topology"], found["earlier"]) == (ONE, ["another"])


def test_another_run_keeps_its_shape(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_record(store, {"run_id": "a run", "topology": PIPELINE, "earlier": [], "settings": {}})
    keep_topology(store, "an older one", ONE)
    found = read_record(store)
    assert found is not None
    assert found["topology"] == PIPELINE


def test_a_record_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    (tmp_path / "run.json").write_text("no record")
    keep_topology(store, "a run", ONE)
    assert [getattr(record, "event", "") for record in caplog.records] == ["topology_not_kept"]
