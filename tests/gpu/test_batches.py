"""Batches on a GPU are reduced there, and nobody waits for the result (`runtime/data/digest.py`)."""

from __future__ import annotations

import torch

from swift_ft.runtime.data.digest import BatchDigest
from tests.support.gpu import DEVICE, compute_for


def test_batches_on_a_device() -> None:
    batch = torch.randn(64, 3, 128, 128, device=DEVICE)
    digest = BatchDigest([batch, torch.ones(3)]).value
    assert digest == BatchDigest([batch.clone(), torch.ones(3)]).value
    for other in (batch.flip(0), batch + 1, batch.half()):
        assert digest != BatchDigest([other, torch.ones(3)]).value
    assert digest != BatchDigest([batch, torch.zeros(3)]).value


def test_a_digest_does_not_wait_for_the_device() -> None:
    batch = torch.randn(8, 8, device=DEVICE)
    expected = BatchDigest(batch).value
    compute_for(200)
    digest = BatchDigest(batch)
    assert not digest.ready
    assert digest.value == expected
    assert digest.ready
