"""``layers.json``: what is written is read again, and what is broken is named in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.costs.layer_profile import (
    LayerProfile,
    layers_from_json,
    layers_to_json,
    read_layers,
    write_layers,
)
from swift_ft.errors import UsageError

GOOD = {"forward_s": 0.001, "backward_s": 0.002, "state_bytes": 100}
AMOUNTS = st.integers(0, 10**15)


@given(st.lists(st.builds(LayerProfile, AMOUNTS.map(lambda n: n + 1), AMOUNTS, AMOUNTS, AMOUNTS), min_size=1))
def test_what_is_written_is_read_again_to_the_nanosecond(layers: list[LayerProfile]) -> None:
    assert layers_from_json(layers_to_json(layers)) == tuple(layers)


def test_a_file_with_all_keys(tmp_path: Path) -> None:
    entries = [{**GOOD, "name": "in"}, {**GOOD, "activation_bytes": 5e3, "shared": "in"}]
    (tmp_path / "a.json").write_text(json.dumps({"layers": entries}))
    layers = read_layers(tmp_path / "a.json")
    assert layers == (
        LayerProfile(1_000_000, 2_000_000, 100, name="in"),
        LayerProfile(1_000_000, 2_000_000, 100, 5_000, shared_with=0),
    )
    write_layers(layers, tmp_path / "b.json")
    assert read_layers(tmp_path / "b.json") == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "needs a list 'layers'"),
        ('{"layers": []}', "at least one layer"),
        ('{"layers": [3]}', "layer 0 is 3"),
    ],
)
def test_a_broken_file_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^l\.json: .*{message}"):
        layers_from_json(text, "l.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_s": None}, "has no 'forward_s'"),
        ({"forward_s": "fast"}, "'forward_s' is 'fast'"),
        ({"backward_s": -1}, "'backward_s' is -1: it must be between 0"),
        ({"backward_s": 1e30}, "must be between 0 and"),
        ({"backward_s": 10**400}, "must be between 0 and"),
        ({"state_bytes": 10**400}, "must be between 0 and"),
        ({"backward_s": True}, "must be a finite number"),
        ({"state_bytes": 1.5}, "a whole number of bytes"),
        ({"state_bytes": float("inf")}, "a finite number"),
        ({"memory": 3}, "unknown key 'memory'"),
        ({"shared": "gone"}, "'shared' is 'gone'"),
        ({"shared": 1}, "an earlier layer"),
        ({"name": "first"}, "there is a layer 'first' already"),
        ({"name": 3}, "'name' is 3"),
    ],
)
def test_a_broken_layer_is_named(change: dict[str, Any], message: str) -> None:
    text = json.dumps({"layers": [{**GOOD, "name": "first"}, {**GOOD, **change}]})
    with pytest.raises(UsageError, match=f"layer 1.*{message}"):
        layers_from_json(text)


def test_layers_without_time_are_refused() -> None:
    with pytest.raises(UsageError, match="no layer takes any time"):
        layers_from_json('{"layers": [{"forward_s": 0, "backward_s": 0, "state_bytes": 1}]}')


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.json cannot be read"):
        read_layers(tmp_path / "gone.json")
