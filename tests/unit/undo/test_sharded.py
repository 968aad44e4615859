"""FSDP2: parameters, gradients and state are shards of one tensor (§4 works on what a worker has)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import optim_db

from swift_ft import wrap_optimizer
from swift_ft.errors import UndoError
from swift_ft.optim import Lamb, UndoableOptimizer
from swift_ft.testing.undo_rule_conformance import assert_same_bits, picture, set_grads
from swift_ft.torch_core.shards import local
from tests.support.optimizers import BOTH_WAYS
from tests.support.shards import sharded, worker_of_mesh

pytestmark = BOTH_WAYS

SHAPES = ((5, 7), (3, 2), (9,))
STEPS = 3

REFUSED_BY_TORCH = {
    ("Adafactor", ""),
    ("Adafactor", "foreach"),
    ("Adagrad", "fused"),
    ("LBFGS", ""),
    ("Rprop", ""),
    ("Rprop", "foreach"),
    ("SGD", "fused"),
    ("SparseAdam", ""),
}
"""torch 2.13 has no rules for what these compute on shards, and says so in the first step."""

COMMUNICATES = {"Muon"}
"""Its step multiplies matrices that no worker has whole."""

INFOS: list[Any] = optim_db

ELEMENTWISE = [
    (info, implementation)
    for info in INFOS
    if info.optim_cls.__name__ not in COMMUNICATES
    for implementation in ("", *(("foreach",) if "foreach" in info.supported_impls else ()))
    + (("fused",) if "cpu" in info.supports_fused_on else ())
    if (info.optim_cls.__name__, implementation) not in REFUSED_BY_TORCH
]


def make(kind: Any, implementation: str, params: list[torch.Tensor]) -> Optimizer:
    options: dict[str, Any] = {implementation: True} if implementation else {"foreach": False}
    if kind is torch.optim.SGD:
        options["momentum"] = 0.9
    optimizer: Optimizer = kind(params, lr=0.01, **options)
    return optimizer


def whole_parameters() -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) for shape in SHAPES]


def local_picture(optimizer: Optimizer) -> Any:
    """As :func:`picture`, with plain tensors in the place of shards."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, local, picture(optimizer))


@pytest.mark.parametrize("exact", [False, True], ids=["bounded", "exact"])
@pytest.mark.parametrize(("info", "implementation"), ELEMENTWISE)
def test_a_shard_is_undone_as_a_plain_tensor_is(info: Any, implementation: str, exact: bool) -> None:
    """The same bits as an optimizer of plain tensors that hold what the shard holds; nothing communicates."""
    with worker_of_mesh(rank=1) as mesh:
        pieces = [sharded(whole, mesh) for whole in whole_parameters()]
        plain = [torch.nn.Parameter(local(piece).clone()) for piece in pieces]
        parts = [torch.nn.Parameter(piece) for piece in pieces]
        of_plain = wrap_optimizer(make(info.optim_cls, implementation, list(plain)), exact=exact)
        of_shards = wrap_optimizer(make(info.optim_cls, implementation, list(parts)), exact=exact)
        for seed in range(STEPS):
            wholes = whole_parameters()
            set_grads(wholes, seed)
            for part, other, whole in zip(parts, plain, wholes, strict=True):
                assert whole.grad is not None
                part.grad = sharded(whole.grad, mesh)
                other.grad = local(part.grad).clone()
            before = local_picture(of_shards)
            with CommDebugMode() as communication:
                step_both_undo_both(of_shards, of_plain)
            assert communication.get_total_counts() == 0
            assert_same_bits(local_picture(of_shards), picture(of_plain))
            if exact:
                assert_same_bits(local_picture(of_shards), before)
            of_shards.step()
            of_plain.step()
            assert_same_bits(local_picture(of_shards), picture(of_plain))


@pytest.mark.parametrize("exact", [False, True], ids=["bounded", "exact"])
def test_a_gradient_may_be_whole_on_all_workers(exact: bool) -> None:
    """As tensor parallelism leaves it where a stage's output is gathered: the optimizer takes its part."""
    with worker_of_mesh(rank=1) as mesh:
        piece = sharded(torch.linspace(-1, 1, 12).view(6, 2), mesh)
        of_shards, of_plain = (
            wrap_optimizer(torch.optim.AdamW([torch.nn.Parameter(one)], foreach=False), exact=exact)
            for one in (piece, local(piece).clone())
        )
        part, plain = (optimizer.param_groups[0]["params"][0] for optimizer in (of_shards, of_plain))
        whole = torch.arange(12.0).view(6, 2)
        plain.grad = local(sharded(whole, mesh)).clone()
        part.grad = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
        for optimizer in (of_shards, of_plain):
            optimizer.step()
            optimizer.step()
            assert optimizer.undo() == 1
        assert_same_bits(local_picture(of_shards), picture(of_plain))


def step_both_undo_both(one: UndoableOptimizer, other: UndoableOptimizer) -> None:
    for optimizer in (one, other):
        optimizer.step()
        assert optimizer.undo() == len(SHAPES)


@pytest.mark.parametrize(("name", "implementation"), sorted(REFUSED_BY_TORCH))
def test_torch_refuses_the_others(name: str, implementation: str) -> None:
    """When it no longer does, they belong into the test above."""
    info = next(info for info in INFOS if info.optim_cls.__name__ == name)
    options: dict[str, Any] = {implementation: True} if implementation else {}
    with worker_of_mesh(rank=1) as mesh:
        part = torch.nn.Parameter(sharded(torch.ones(5, 3), mesh))
        optimizer = info.optim_cls([part], lr=0.01, **options)
        part.grad = sharded(torch.ones(5, 3), mesh)
        with pytest.raises((RuntimeError, NotImplementedError)):
            optimizer.step(lambda: 1.0)


def test_gradients_that_fsdp_added_to_are_noticed() -> None:
    """FSDP adds to the shard itself, which its DTensor does not count."""
    with worker_of_mesh() as mesh:
        part = torch.nn.Parameter(sharded(torch.ones(5, 3), mesh))
        wrapped = wrap_optimizer(torch.optim.AdamW([part], lr=0.1))
        part.grad = sharded(torch.ones(5, 3), mesh)
        wrapped.step()
        assert isinstance(part.grad, DTensor)
        part.grad._local_tensor += 1
        with pytest.raises(UndoError, match="gradient of shape"):
            wrapped.undo()


@pytest.fixture
def mesh(one_process: None) -> Any:
    return init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Muon, Lamb])
def test_a_step_that_communicates_is_undone(mesh: Any, kind: type[Optimizer], exact: bool) -> None:
    whole = torch.linspace(-1, 1, 35).view(5, 7)
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    wrapped = wrap_optimizer(kind([param], lr=0.01), exact=exact)  # type: ignore[call-arg]  # both have it
    for seed in range(3):
        plain = torch.empty(5, 7)
        set_grads([plain], seed)
        assert plain.grad is not None
        param.grad = distribute_tensor(plain.grad, mesh, [Shard(0)])
        before = param.detach().clone()
        wrapped.step()
        assert wrapped.undo() == 1
        rounding: dict[str, Any] = {} if not exact else {"rtol": 0, "atol": 0}
        assert isinstance(before, DTensor)
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.to_local(), before.to_local(), **rounding)
        wrapped.step()
