"""Wrong use gets a clear error at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import swift_ft
from swift_ft.errors import NotLaunchedError, StoreNotWritableError, UsageError
from swift_ft.logging import LogBudget, Store
from swift_ft.recovery.failures import is_broken_communication
from swift_ft.session import _groups, _log_options
from swift_ft.testing.faults import Fault, fail_at, parse_faults


def parts() -> dict[str, object]:
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def test_without_the_launcher() -> None:
    with pytest.raises(NotLaunchedError, match="swift-run --standalone"):
        swift_ft.Session(parts(), store="memory://nowhere")


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ({}, {}, "nothing to protect"),
        ({"model": object()}, {}, "no state_dict"),
        (parts(), {"checkpoint_every": 0}, "at least 1"),
        (parts(), {"keep_checkpoints": 0}, "at least 1"),
    ],
)
def test_arguments_without_sense(state: dict[str, object], options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        swift_ft.Session(state, store="memory://nowhere", **options)


def test_store_of_an_unknown_kind() -> None:
    with pytest.raises(StoreNotWritableError):
        Store("gopher://hole/run")


def test_a_users_exception_is_no_peers_death() -> None:
    def loss_fn() -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:15788")

    with pytest.raises(RuntimeError) as caught:
        loss_fn()
    assert not is_broken_communication(caught.value)


def test_faults_read_what_they_print() -> None:
    fault = fail_at(machine=1, iteration=47, point="forward", microbatch=3)
    text = "kill machine=1 iteration=47 point=forward microbatch=3"
    assert str(fault) == text
    both = parse_faults(f"{text}; stop worker=2 iteration=50 point=optimizer")
    assert both[0] == fault
    assert isinstance(both[1], Fault)
    assert parse_faults(" ; ".join(map(str, both))) == both


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill machine=x iteration=1",
        "melt machine=1 iteration=1",
        "kill machine=1 iteration=1 where=here",
    ],
)
def test_faults_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse_faults(text)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"ship": "sometimes"}, r"ship must be one of 'always', 'on-failure', not 'sometimes'"),
        ({"compress": "yes"}, r"compress must be one of 'auto', 'never', 'always', not 'yes'"),
        (
            {"budget": 4 << 20, "workers": 8},
            r"gives a worker 524288 bytes of memory: it needs at least 1 MiB",
        ),
        ({"budget": LogBudget(disk_bytes=1000)}, r"gives a worker 1000 bytes of disk"),
    ],
)
def test_options_of_the_log_without_sense_are_told(arguments: dict[str, Any], told: str) -> None:
    options = {"budget": LogBudget(), "ship": "always", "local": None, "compress": "auto", "workers": 1}
    with pytest.raises(UsageError, match=told):
        _log_options(**{**options, **arguments})


def test_a_plain_budget_is_for_memory_and_disk(tmp_path: Path) -> None:
    options = _log_options(8 << 20, "on-failure", tmp_path, "never", 2)
    assert options.budget == LogBudget(4 << 20, 4 << 20)
    assert options.local == tmp_path


@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0], [1]], [[0], [1], [2], [3]]])
def test_groups_name_every_machine_once(groups: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="groups must name each of the 3 machines once, 0 to 2"):
        _groups(groups, 3)


def test_the_group_of_each_machine(tmp_path: Path) -> None:
    assert _groups(None, 3) == (0, 1, 2)
    assert _groups([[2, 0], [1]], 3) == (0, 1, 0)
    (tmp_path / "groups.json").write_text('{"groups": [[0], [1, 2]]}')
    assert _groups(tmp_path / "groups.json", 3) == (0, 1, 1)
    (tmp_path / "groups.json").write_text('{"groups": 3}')
    with pytest.raises(UsageError, match="has no list of lists 'groups'"):
        _groups(tmp_path / "groups.json", 3)
