"""Modes of torch that a script sets, and that are put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.backends import cudnn

from swift_ft.torch_core.global_modes import GlobalModes

FLAGS: Any = torch.backends.flags_frozen.__globals__
FROZEN = "__allow_nonbracketed_mutation_flag"
MODES: dict[str, tuple[Callable[[], Any], Callable[[], object]]] = {
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "dtype of autocast": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "cache of autocast": (torch.is_autocast_cache_enabled, lambda: torch.set_autocast_cache_enabled(False)),
    "precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("high")),
    "deterministic": (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("warn")),
    "anomalies": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "no check for NaN": (
        torch.is_anomaly_check_nan_enabled,
        lambda: torch.autograd.set_detect_anomaly(False, check_nan=False),
    ),
    "benchmark": (lambda: cudnn.benchmark, lambda: setattr(cudnn, "benchmark", True)),
    "deterministic cuDNN": (lambda: cudnn.deterministic, lambda: setattr(cudnn, "deterministic", True)),
    "no cuDNN": (lambda: cudnn.enabled, lambda: setattr(cudnn, "enabled", False)),
}
"""What tells each mode, and what sets another one than there is at the start."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """All modes can be set, also after torch.testing's parts were imported, and are put back in the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FLAGS, FROZEN, True)
        modes = GlobalModes()
        yield
        modes.put_back()


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_put_back(name: str) -> None:
    read, change = MODES[name]
    before, noted = read(), GlobalModes()
    change()
    assert read() != before
    noted.put_back()
    assert read() == before


def test_a_mode_that_nobody_can_set_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = GlobalModes()
    cudnn.benchmark = True
    torch.set_default_dtype(torch.float64)
    with monkeypatch.context() as frozen:
        frozen.setitem(FLAGS, FROZEN, False)
        noted.put_back()
    assert (torch.get_default_dtype(), cudnn.benchmark) == (torch.float32, True)


def test_what_is_set_later_stays() -> None:
    noted = GlobalModes()
    torch.set_default_dtype(torch.float64)
    noted.keep_changed()
    torch.set_float32_matmul_precision("high")
    noted.put_back()
    assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == (torch.float32, "high")


def test_autocast_does_not_know_parameters_of_before() -> None:
    """It keeps them in the other dtype, while an undo or a copy changes them."""
    layer = torch.nn.Linear(1, 1, bias=False)
    noted = GlobalModes()
    torch.set_autocast_enabled("cpu", True)
    before = layer(torch.ones(1))
    noted.put_back()
    with torch.no_grad():
        layer.weight.data.add_(1)
    torch.set_autocast_enabled("cpu", True)
    assert layer(torch.ones(1)) > before + 0.5


def test_a_mode_that_torch_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to, where a script has used two kinds of settings for one thing."""
    from swift_ft.torch_core import global_modes

    def refuses() -> None:
        raise RuntimeError("mixed settings")

    def sets(_: object) -> None:
        pytest.fail("it was set")

    monkeypatch.setattr(global_modes, "_modes", lambda: {"precision": (refuses, sets)})
    noted = GlobalModes()
    noted.put_back()
    noted.keep_changed()
    noted.put_back()
