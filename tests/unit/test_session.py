"""Wrong use gets a clear error at once."""

from __future__ import annotations

import pytest
import torch

import swift_ft
from swift_ft.errors import NotLaunchedError, StoreNotWritableError, UsageError
from swift_ft.logging import Store
from swift_ft.recovery.failures import is_broken_communication
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
