"""Shared by the tests of the undo: comparisons in ulps, and both ways of an exact undo."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from swift_ft.testing.undo_rule_conformance import Picture

BOTH_WAYS = pytest.mark.parametrize(
    "copied_bytes", [0, 64 * 2**20], ids=["inverted", "copied"], indirect=True
)
"""With ``exact``, a test runs twice: all is inverted, and all is copied since it is small."""


def ulps(now: Tensor, then: Tensor, *others: Tensor) -> float:
    """The largest error, in units in the last place of the largest of the values concerned."""
    if not then.numel() or not (then.is_floating_point() or then.is_complex()):
        return 0.0 if torch.equal(now, then) else float("inf")
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in (now, then, *others)]
    limits = torch.finfo(tensors[1].dtype)
    values = [tensor.double() for tensor in tensors]
    size = torch.stack([value.abs() for value in values]).amax(0).clamp_min(limits.smallest_normal)
    return float(((values[0] - values[1]).abs() / (size * limits.eps)).max())


def assert_close(
    now: Picture, then: Picture, after: Picture, allowed: float, added: Mapping[str, Tensor] | None = None
) -> None:
    """Checks that an undo restored all tensors within ``allowed`` ulps, and all counters exactly.

    An ulp is that of the largest value before or after the step, or of what the step added up, if that is
    given by name: its parts may nearly cancel out.
    """
    assert now.keys() == then.keys()
    for name, value in then.items():
        if not isinstance(value, Tensor):
            assert now[name] == value, name
        elif value.numel() == 1 and name.split(".")[1] in ("step", "eta", "mu", "mu_product", "lr"):
            assert torch.equal(now[name], value), name
        else:
            error = ulps(now[name], value, after[name], *(t for n, t in (added or {}).items() if n == name))
            assert error <= allowed, f"{name}: {error:.1f} ulps"
