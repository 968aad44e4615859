"""Copies of buffers on the private seams of torch's modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from swift_ft.torch_core.buffers import BufferCopies, copy_all


def test_batch_normalisation_changes_buffers_without_counting() -> None:
    """Why they are copied. Should torch count one day, copies are still right."""
    model = nn.BatchNorm1d(2)
    mean = model.running_mean
    assert mean is not None
    before, version = mean.clone(), mean._version
    model(torch.randn(4, 2))
    assert mean._version == version
    assert not mean.equal(before)


def test_buffers_are_where_torch_keeps_them() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    copies = BufferCopies(model.modules())
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(7)
    assert BufferCopies(model.modules()).differs_from(copies)
    copies.restore()
    assert not BufferCopies(model.modules()).differs_from(copies)


def test_a_buffer_that_two_modules_share() -> None:
    one, other = nn.Module(), nn.Module()
    one.register_buffer("table", table := torch.ones(2))
    other.register_buffer("table", table)
    copies = BufferCopies([one, other])
    one.register_buffer("table", torch.zeros(2))
    table.fill_(3)
    copies.restore()
    assert one.get_buffer("table") is other.get_buffer("table")
    assert one.get_buffer("table").equal(torch.ones(2))


def test_many_dtypes_at_once() -> None:
    sources = [torch.tensor([1.5]), torch.tensor(2), torch.tensor([True]), torch.tensor([1 + 2j])]
    targets = [torch.zeros_like(source) for source in sources]
    copy_all(targets, sources)
    assert all(target.equal(source) for target, source in zip(targets, sources, strict=True))


def test_buffers_of_a_split_model(one_process: None) -> None:
    """A table that is a DTensor: torch has no sharding strategy for a copy of many."""
    model = nn.Module()
    mesh = init_device_mesh("cpu", (1,))
    model.register_buffer("table", distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    copies = BufferCopies([model])
    with torch.no_grad():
        model.get_buffer("table").fill_(7)
    assert BufferCopies([model]).differs_from(copies)
    copies.restore()
    assert not BufferCopies([model]).differs_from(copies)
