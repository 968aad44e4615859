"""An exact step copies what is small; and a step that nobody undoes notes little."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from swift_ft import undo_support, wrap_optimizer
from swift_ft.optim import UndoableOptimizer
from swift_ft.testing.undo_rule_conformance import assert_same_bits, picture, randoms, set_grads
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import all_versions_of, version_of
from swift_ft.undo import copies, records
from swift_ft.undo.residual import Residual
from swift_ft.undo.rules.adam import AdamRule
from tests.support.shards import sharded, worker_of_mesh

LIMIT = 64 * 2**20
SHAPES = ((33,), (7, 5), (1,), (2, 3, 4), (0, 3))
ELEMENTS = 93

all_is_copied = pytest.mark.parametrize("copied_bytes", [LIMIT], ids=[""], indirect=True)
half_is_copied = pytest.mark.parametrize(
    "copied_bytes", [12 * ELEMENTS * 3 // 2], ids=["of two optimizers, one"], indirect=True
)


def made(exact: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> UndoableOptimizer:
    params = [value.requires_grad_() for value in randoms(SHAPES, dtype, 0)]
    return wrap_optimizer(torch.optim.AdamW(params, lr=0.1, foreach=True, **options), exact=exact)


def step(optimizer: UndoableOptimizer, seed: int, without: int | None = None) -> None:
    set_grads(parameters_of(optimizer), seed)
    if without is not None:
        parameters_of(optimizer)[without].grad = None
    optimizer.step()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something was called that a step may do for each parameter, or for all."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (torch, "_foreach_copy_"),
        (torch, "empty_like"),
        (Residual, "store"),
        (AdamRule, "invert"),
        (records, "ParamUpdate"),
    ):
        count(owner, name)
    return counts


@all_is_copied
def test_a_step_is_a_copy_in_one_call(calls: Counter[str]) -> None:
    optimizer = made()
    for seed in range(3):
        step(optimizer, seed)
        optimizer.zero_grad()
    calls.clear()
    before = picture(optimizer)
    step(optimizer, 3)
    assert calls == {"_foreach_copy_": 1}, "no memory, no inverse, nothing for each parameter"
    optimizer.undo()
    assert_same_bits(picture(optimizer), before)
    assert calls["invert"] == 0


@pytest.mark.parametrize("copied_bytes", [0], ids=["nothing is copied"], indirect=True)
def test_what_is_too_large_is_inverted(calls: Counter[str]) -> None:
    """The counts of the test above are none of something that never happens."""
    optimizer = made()
    step(optimizer, 0)
    calls.clear()
    before = picture(optimizer)
    step(optimizer, 1)
    assert calls["store"] == 3 * len(SHAPES)
    assert calls["invert"] >= 1
    optimizer.undo()
    assert_same_bits(picture(optimizer), before)


def test_a_step_without_exact_notes_nothing_of_each_parameter(calls: Counter[str]) -> None:
    optimizer = made(exact=False)
    for seed in range(2):
        step(optimizer, seed)
        optimizer.zero_grad()
        assert optimizer.windows_opened == seed + 1
    assert not calls
    assert optimizer.undo() == len(SHAPES)
    assert calls["ParamUpdate"] == len(SHAPES)


@all_is_copied
def test_steps_with_other_parameters_each_time() -> None:
    """Some have no gradient, then others; a few are updated ahead, and some of these undone."""
    optimizer = made()
    first, second, *_ = parameters_of(optimizer)
    for seed, without in enumerate((None, 1, 0, None, 3, 1)):
        before = picture(optimizer)
        step(optimizer, seed, without)
        after = picture(optimizer)
        optimizer.undo()
        assert_same_bits(picture(optimizer), before)
        set_grads(parameters_of(optimizer), seed)
        if without is not None:
            parameters_of(optimizer)[without].grad = None
        some = [p for p in (first, second) if p.grad is not None]
        optimizer.update(some)
        optimizer.undo(some[:1])
        optimizer.update(some[:1])
        optimizer.step()
        assert_same_bits(picture(optimizer), after)
        optimizer.undo(some)
        optimizer.undo()
        assert_same_bits(picture(optimizer), before)
        optimizer.step()
        assert_same_bits(picture(optimizer), after)


@all_is_copied
def test_parameters_that_become_others_in_place(calls: Counter[str]) -> None:
    """``model.double()`` keeps its parameters; their copies are of the new type."""
    optimizer = made()
    step(optimizer, 0)
    for param in parameters_of(optimizer):
        param.grad = None
        param.data = param.data.double() + 1e-12
        fields = optimizer.state[param]
        fields.update({key: value.double() for key, value in fields.items() if key != "step"})
    before = picture(optimizer)
    calls.clear()
    step(optimizer, 1)
    assert calls["empty_like"] >= 3 * len(SHAPES), "other memory"
    optimizer.undo()
    assert_same_bits(picture(optimizer), before)


@half_is_copied
def test_all_optimizers_of_a_process_share_the_room(calls: Counter[str]) -> None:
    gc.collect()  # those of other tests
    one, other = made(), made()

    for seed in range(3):
        for optimizer in (one, other):
            before = picture(optimizer)
            step(optimizer, seed)
            optimizer.undo()
            assert_same_bits(picture(optimizer), before)
            optimizer.step()
        # A first step copies parameters alone, since it makes the state.
        assert bool(calls["store"]) == (seed > 0)
    assert one.undo_memory_bytes() == 12 * ELEMENTS
    assert other.undo_memory_bytes() < 4 * ELEMENTS
    assert undo_support(one).extra_bytes_per_element == 12
    assert undo_support(other).extra_bytes_per_element == 3
    del one
    gc.collect()
    step(other, 2)
    assert other.undo_memory_bytes() == 12 * ELEMENTS


@all_is_copied
def test_what_it_says_of_memory_is_so() -> None:
    optimizer = made()
    for seed in range(2):
        step(optimizer, seed)
    support = undo_support(optimizer)
    assert (support.method, support.exact) == ("journal", True)
    assert support.journaled == ("param", "exp_avg", "exp_avg_sq")
    assert optimizer.undo_memory_bytes() == support.extra_bytes_per_element * ELEMENTS == 12 * ELEMENTS
    optimizer.close_undo_window()
    assert optimizer.undo_memory_bytes() == 0
    assert undo_support(optimizer, exact=False).extra_bytes_per_element == 0


@all_is_copied
def test_wrapping_again_without_exact_releases_the_memory() -> None:
    optimizer = made()
    step(optimizer, 0)
    held = optimizer._undo.copies
    assert copies.room_bytes() <= copies.room_bytes(without=held) - 4 * ELEMENTS
    wrap_optimizer(optimizer)
    assert copies.room_bytes() == copies.room_bytes(without=held)


@all_is_copied
def test_what_is_no_plain_tensor_is_not_copied(calls: Counter[str]) -> None:
    """Of a subclass, nobody knows what a copy of its values is."""

    class Quantized(torch.Tensor):
        pass

    optimizer = made()
    step(optimizer, 0)
    state = optimizer.state[parameters_of(optimizer)[0]]
    average = state["exp_avg"] = state["exp_avg"].as_subclass(Quantized)
    calls.clear()
    before = [value.detach().clone() for value in (parameters_of(optimizer)[0], average)]
    step(optimizer, 1)
    assert calls["store"] > 0
    optimizer.undo()
    assert parameters_of(optimizer)[0].equal(before[0])
    assert average.equal(before[1])


@all_is_copied
def test_a_shard_that_is_another_tensor_by_the_time_of_the_undo() -> None:
    """As FSDP makes a new one for the same parameter."""
    with worker_of_mesh(rank=1) as mesh:
        part = torch.nn.Parameter(sharded(torch.linspace(-1, 1, 12).view(6, 2), mesh))
        wrapped = wrap_optimizer(torch.optim.SGD([part], lr=0.1), exact=True)
        part.grad = sharded(torch.ones(6, 2), mesh)
        before = local(part).clone()
        wrapped.step()
        assert isinstance(part, DTensor)
        part._local_tensor = part._local_tensor.clone()  # with the same count of changes
        assert all_versions_of([part]) == [version_of(part)]
        wrapped.undo()
        assert local(part).equal(before)


def test_versions_of_many_are_those_of_each() -> None:
    with torch.inference_mode():
        inference = torch.ones(2)
    plain = torch.ones(2).add_(1).mul_(2)
    assert all_versions_of([plain, torch.ones(1)]) == [2, 0]
    assert all_versions_of([plain, inference]) == [2, 0]
    with worker_of_mesh() as mesh:
        shard = sharded(torch.ones(4, 2), mesh)
        shard._local_tensor.add_(1)
        assert all_versions_of([plain, shard]) == [2, version_of(shard)]
        assert version_of(shard) > 0
