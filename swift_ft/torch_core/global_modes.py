"""Modes of torch that hold for the whole process or thread, and that a script may set without a ``with``.

A step or a hook that is interrupted between ``torch.set_grad_enabled(False)`` and ``(True)`` is repeated, and
so needs them as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.backends import cudnn

_UNREADABLE: Any = object()
"""In the place of a mode that torch does not tell: it refuses where a script has used its older settings of
precision and its newer ones."""


class GlobalModes:
    """The modes at one moment."""

    def __init__(self) -> None:
        self._noted = {name: _read(name) for name in _modes()}

    def put_back(self) -> None:
        """As they were."""
        for name, value in self._noted.items():
            if value is not _UNREADABLE and _read(name) not in (value, _UNREADABLE):
                _write(name, value)

    def keep_changed(self) -> None:
        """From now on, put back only what has changed until now. Later changes are others' own."""
        self._noted = {name: value for name, value in self._noted.items() if _read(name) != value}


@cache
def _modes() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """All of them: what reads one, and what sets it."""
    accelerator = torch.accelerator.current_accelerator()
    devices = {"cpu", *((accelerator.type,) if accelerator is not None else ())}
    return {
        "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "dtype": (torch.get_default_dtype, torch.set_default_dtype),
        **{f"autocast on {one}": (partial(_autocast, one), partial(_set_autocast, one)) for one in devices},
        "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "anomalies": (_anomalies, lambda modes: torch.autograd.set_detect_anomaly(*modes)),
        **{f"cuDNN: {one}": (partial(getattr, cudnn, one), partial(setattr, cudnn, one)) for one in _CUDNN},
    }


_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")


def _read(name: str) -> Any:
    read, _ = _modes()[name]
    try:
        return read()
    except RuntimeError:
        return _UNREADABLE


def _write(name: str, value: Any) -> None:
    _, write = _modes()[name]
    # Whoever calls torch.backends.disable_global_flags(), as torch's own tests do, can set some no more.
    with contextlib.suppress(RuntimeError):
        write(value)


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_autocast(device: str, mode: tuple[bool, torch.dtype]) -> None:
    enabled, dtype = mode
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.clear_autocast_cache()  # it has parameters as the interrupted step knew them


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
