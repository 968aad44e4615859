"""Conformance: DDP's argument, attribute and method that say whether it keeps buffers equal."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_adapters.versions.buffer_sync import BUFFER_SYNC, keeps_buffers_equal

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("equal", [True, False])
def test_a_model_says_what_it_was_told(equal: bool) -> None:
    given: dict[str, Any] = {BUFFER_SYNC: equal}
    model = DistributedDataParallel(nn.BatchNorm1d(2), **given)
    assert keeps_buffers_equal(model) is equal
    assert model.will_sync_module_buffers() is equal


def test_by_default_buffers_are_kept_equal() -> None:
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    assert keeps_buffers_equal(model)
    with model.no_sync():
        model.require_forward_param_sync = False  # as a forward pass without averages leaves it
        assert not model.will_sync_module_buffers()
    assert not DistributedDataParallel(nn.Linear(2, 2)).will_sync_module_buffers()  # it has no buffers
