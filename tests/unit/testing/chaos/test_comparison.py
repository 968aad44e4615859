"""The state of a run is what its last checkpoint has: each part once, with names that a process has, too."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.state_values import digests_of
from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.comparison import (
    UNDO_BOUND,
    largest_difference,
    last_state,
    newest_intact,
    without_repeated,
)
from swift_ft.testing.chaos.plain import _saved
from tests.unit.testing.chaos.saved import save, state_of


def test_a_part_that_replicas_share_is_compared_once(tmp_path: Path) -> None:
    shared = last_state(save(tmp_path / "shared", state_of(), parts={0: 0, 1: 0}))
    assert shared == last_state(save(tmp_path / "alone", state_of()))
    assert {name.split(".")[0] for name in shared} == {"iteration", "worker 0"}


def test_parts_of_their_own_are_all_compared(tmp_path: Path) -> None:
    """Each by the first worker that has it: a pipeline of two stages with two replicas."""
    url = save(tmp_path, state_of(1.0), state_of(2.0), parts={0: 0, 1: 1, 2: 0, 3: 1})
    assert {name.split(".")[0] for name in last_state(url)} == {"iteration", "worker 0", "worker 1"}


def test_replicas_that_save_apart_after_a_loss(tmp_path: Path) -> None:
    """What one of them has saved in vain is no difference; what is unlike there is one."""
    undisturbed = last_state(save(tmp_path / "shared", state_of(1.0), parts={0: 0, 1: 0}))
    variable = "plain.bytes.carried.(loop).x"
    for other, differs in ((1.0, False), (2.0, True)):
        apart = last_state(save(tmp_path / f"{other}", state_of(1.0), state_of(other), parts={0: 0, 1: 1}))
        found = without_repeated({**apart, f"worker 1.{variable}": "its own"}, undisturbed)
        assert bool(found.keys() - undisturbed.keys()) == differs
        assert found.items() >= undisturbed.items()


def test_names_and_digests_meet_those_of_a_process(tmp_path: Path) -> None:
    """As ``--torchrun`` needs them, objects of the script's own classes included."""
    state = state_of()
    saved = last_state(save(tmp_path, state))
    there = digests_of(_saved(state), "worker 0")
    assert len(there) > 15
    assert {
        f"worker 0.plain.bytes.small.parts.meters.{name}.class" for name in ("mean", "range")
    } < there.keys()
    assert {name: saved[name] for name in there} == there
    other = digests_of(_saved(state_of(meter=4.0)), "worker 0")
    differ = {name.rsplit(".parts.")[1] for name in there if there[name] != other[name]}
    assert differ == {"meters.mean.value", "meters.range.1"}


def test_an_unlike_object_is_seen(tmp_path: Path) -> None:
    one = last_state(save(tmp_path / "one", state_of(meter=3.0)))
    other = last_state(save(tmp_path / "other", state_of(meter=4.0)))
    assert one.keys() == other.keys()
    assert sum(one[name] != other[name] for name in one) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_beyond_any_bound(tmp_path: Path, value: float) -> None:
    """Also after a value that is within it: ``max([1e-7, nan])`` is 1e-7."""
    right, wrong = state_of(), state_of()
    with torch.no_grad():
        right["model"].bias.add_(1.0)
        wrong["model"].bias.add_(1.0 + 1e-7)
        wrong["model"].weight[0, 0] = value
    urls = save(tmp_path / "right", right), save(tmp_path / "wrong", wrong)
    names = [f"worker 0.models.model.{name}" for name in ("bias", "weight")]
    assert 0 < largest_difference(*urls, names[:1]) < 1e-6
    assert largest_difference(*urls, names) == float("inf")
    assert largest_difference(*urls, names[::-1]) == float("inf")


@pytest.mark.parametrize(("bias", "is_within"), [(1e-6, True), (0.5, False)])
def test_a_difference_is_measured_against_all_of_its_kind(
    tmp_path: Path, bias: float, is_within: bool
) -> None:
    """Adam makes whole steps of noise: what is small beside the model may differ. A mask is no measure."""
    urls = []
    for name, value in (("run", bias), ("undisturbed", bias / 2)):
        state = state_of()
        model: nn.Module = state["model"]
        model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        model.get_parameter("bias").data.fill_(value)
        urls.append(save(tmp_path / name, state))
    found = largest_difference(urls[0], urls[1], ["worker 0.models.model.bias"])
    assert (0 < found < UNDO_BOUND) == is_within


def test_a_number_of_python_is_measured_too(tmp_path: Path) -> None:
    urls = save(tmp_path / "run", state_of(meter=3.0)), save(tmp_path / "other", state_of(meter=3.0 + 1e-9))
    names = [name for name in last_state(urls[0]) if "parts.meters" in name and name.endswith("value")]
    assert names
    assert 0 < largest_difference(*urls, names) < 1e-8


def test_a_value_that_is_missing_or_no_tensor_is_beyond_any_bound(tmp_path: Path) -> None:
    urls = save(tmp_path / "one", state_of()), save(tmp_path / "other", state_of())
    assert largest_difference(*urls, ["worker 1.models.model.bias"]) == float("inf")
    assert largest_difference(*urls, []) == 0.0


def test_a_checkpoint_of_which_a_part_is_gone_does_not_load(tmp_path: Path) -> None:
    url = save(tmp_path, state_of(), state_of())
    assert newest_intact(url) == 4
    lost = [*(tmp_path / "checkpoints" / "00000004" / "rank-00001.g00001").iterdir()]
    for file in lost:
        file.unlink()
    with pytest.raises(SwiftError):
        newest_intact(url)
    assert newest_intact(url, damaged=[str(file.relative_to(tmp_path)) for file in lost]) is None


def test_a_store_without_any_checkpoint_has_none_that_a_fault_has_damaged(tmp_path: Path) -> None:
    with pytest.raises(SwiftError, match="there is no checkpoint"):
        newest_intact(str(tmp_path))
