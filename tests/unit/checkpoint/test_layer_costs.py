"""What layers have cost in a run is what the runs after it begin with."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import swift_ft
from swift_ft.checkpoint import layer_costs
from swift_ft.checkpoint.layer_costs import keep_layers
from swift_ft.checkpoint.run_record import RECORD, write_record
from swift_ft.costs.layer_profile import LayerProfile, read_layers
from swift_ft.errors import UsageError
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store


def layers(*milliseconds: int) -> tuple[LayerProfile, ...]:
    return tuple(
        LayerProfile(ms * 400_000, ms * 600_000, 1000 * ms, name=str(n)) for n, ms in enumerate(milliseconds)
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Of three runs, the first and the second of which have measured."""
    made = Store(tmp_path)
    for run, earlier in (("a/1", []), ("a/2", ["a/1"]), ("a/3", ["a/1", "a/2"])):
        write_record(made, {"run_id": run, "topology": {}, "earlier": earlier, "settings": {}})
    keep_layers(made, "a/1", layers(7, 1, 1))
    keep_layers(made, "a/2", layers(1, 2, 3))
    return made


def test_the_newest_run_that_measured_says_them(one_process: None, store: Store) -> None:
    assert swift_ft.measured_costs(store.url, 3) == layers(1, 2, 3)
    keep_layers(store, "a/3", layers(5, 5, 5))
    assert swift_ft.measured_costs(store.url, 3) == layers(5, 5, 5)


def test_a_run_that_starts_again_begins_as_it_did(
    one_process: None, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own measurements came after its beginning. Workers that differ would be refused."""
    keep_layers(store, "a/3", layers(5, 5, 5))
    monkeypatch.setattr(layer_costs, "_own_run", lambda: "a/3")
    assert swift_ft.measured_costs(store.url, 3) == layers(1, 2, 3)


def test_another_model_s_are_not_taken(one_process: None, store: Store) -> None:
    assert swift_ft.measured_costs(store.url, 4) is None
    keep_layers(store, "a/2", layers(1, 2, 3, 4))
    assert swift_ft.measured_costs(store.url, 3) == layers(7, 1, 1)


@pytest.mark.parametrize("is_there", [True, False], ids=["an empty store", "none yet"])
def test_a_first_run_has_none(is_there: bool, one_process: None, tmp_path: Path) -> None:
    place = tmp_path / "store"
    if is_there:
        place.mkdir()
    assert swift_ft.measured_costs(place, 3) is None
    assert place.exists() == is_there


@pytest.mark.parametrize("content", ["{", "[]", '{"layers": []}', '{"layers": [{"forward_s": -1}]}'])
def test_damaged_ones_are_left_out_and_said_so(
    content: str, one_process: None, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs" / "a_2" / "layers.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert swift_ft.measured_costs(store.url, 3) == layers(7, 1, 1)
    assert [record.__dict__["event"] for record in caplog.records] == ["layer_costs_left_out"]
    assert "runs/a_2/layers.json" in caplog.text


def test_the_file_is_one_for_swift_plan(store: Store, tmp_path: Path) -> None:
    assert read_layers(tmp_path / "runs" / "a_2" / "layers.json") == layers(1, 2, 3)


def test_a_store_of_a_newer_version_is_one_line(one_process: None, store: Store, tmp_path: Path) -> None:
    record = {k: v for k, v in json.loads((tmp_path / RECORD).read_text()).items() if k != "digest"}
    (tmp_path / RECORD).write_text(json.dumps(sealed({**record, "format": 99})))
    with pytest.raises(UsageError, match=r"^A newer version of swift_ft wrote "):
        swift_ft.measured_costs(store.url, 3)


@pytest.mark.parametrize(
    ("url", "words"),
    [("gopher://a/b", "gopher"), ("/proc/1/mem/store", r"The costs of layers cannot be read: ")],
)
def test_a_store_that_cannot_be_read_is_one_line(url: str, words: str, one_process: None) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        swift_ft.measured_costs(url, 3)
    assert "\n" not in str(raised.value)


def test_it_needs_a_group(store: Store) -> None:
    with pytest.raises(UsageError, match=r"Call dist\.init_process_group"):
        swift_ft.measured_costs(store.url, 3)
