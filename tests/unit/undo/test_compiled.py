"""``exact="compiled"``: steps in ranges, with a compiled inverse, have the same bits as ever."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from swift_ft import wrap_optimizer
from swift_ft.optim import Lamb, UndoableOptimizer
from swift_ft.testing.undo_rule_conformance import assert_same_bits, picture, set_grads
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.undo import compiled, slices

OPTIM = torch.optim
ELEMENTS = 1024
SHAPES = [(2 * ELEMENTS + 37,), (ELEMENTS,), (7, 5), (3,), (2, ELEMENTS), (0,)]
"""Ranges and a rest, just one range, several short ones that share a kernel's inputs, and nothing."""

CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (OPTIM.SGD, {"lr": 0.1}),
    (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),  # its kernel writes into gradients
    (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (OPTIM.Adam, {"lr": 0.01, "weight_decay": 0.01, "maximize": True}),
    (OPTIM.AdamW, {"lr": 0.01}),
    (OPTIM.AdamW, {"lr": 0.01, "amsgrad": True}),
    (OPTIM.AdamW, {"lr": 10.0, "weight_decay": 0.1}),  # the parameter is journaled
    (OPTIM.Adamax, {"lr": 0.01}),
    (OPTIM.NAdam, {"lr": 0.01, "weight_decay": 0.01}),
    (OPTIM.RAdam, {"lr": 0.01}),
    (OPTIM.Adagrad, {"lr": 0.01, "weight_decay": 0.01}),
    (OPTIM.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (OPTIM.Adadelta, {"lr": 0.5}),
    (OPTIM.Rprop, {"lr": 0.01}),
    (OPTIM.ASGD, {"lr": 0.01, "t0": 1.0}),
    (Lamb, {"lr": 0.01}),
]
KERNELS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
FUSED = (OPTIM.SGD, OPTIM.Adam, OPTIM.AdamW, OPTIM.Adagrad)

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="NOT TESTED: compiled inverses, because there is no C++ compiler on this machine",
)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "CPU_ELEMENTS", ELEMENTS)
    monkeypatch.setattr(compiled, "_COMPILED", {})


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that would be compiled are run as they are, which takes no compiler and no time."""
    graphs: list[Any] = []

    def compile_nothing(graph: Any, **_: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", compile_nothing)
    return graphs


def named(case: Any) -> str:
    kind, kwargs = case
    return "-".join([kind.__name__, *(f"{key}={value}" for key, value in kwargs.items())])


def options(kind: type[Optimizer]) -> list[dict[str, Any]]:
    if kind is Lamb:
        return [{}]
    return KERNELS if kind in FUSED else KERNELS[:2]


def made(
    kind: Callable[..., Optimizer], kwargs: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Optimizer:
    """Two groups with learning rates of their own; one parameter is not contiguous."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    turned = torch.nn.Parameter(torch.randn(3, ELEMENTS, dtype=dtype).t())
    groups = [{"params": params[:3]}, {"params": [*params[3:], turned], "lr": kwargs["lr"] / 2}]
    return kind(groups, **kwargs)


def steps_and_undoes(plain: Optimizer, last: Callable[[UndoableOptimizer], None] | None = None) -> None:
    """Five steps with gradients of very different size have the plain bits, and so has each undo."""
    wrapped = wrap_optimizer(copy.deepcopy(plain), exact="compiled")
    for seed, scale in enumerate([1.0, 1e-3, 1.0, 1e-8, 1e3]):
        for one in (plain, wrapped):
            set_grads(parameters_of(one), seed, scale)
        before = picture(wrapped)
        plain.step()
        wrapped.step()
        if last:
            last(wrapped)
        assert_same_bits(picture(wrapped), picture(plain))
        for mine, theirs in zip(parameters_of(wrapped), parameters_of(plain), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert mine.grad.equal(theirs.grad) or wrapped.param_groups[0].get("nesterov")
        wrapped.undo()
        assert_same_bits(picture(wrapped), before)
        set_grads(parameters_of(wrapped), seed, scale)
        wrapped.step()
        assert_same_bits(picture(wrapped), picture(plain))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_ranges_of_a_parameter_have_the_bits_of_the_whole(
    case: tuple[type[Optimizer], dict[str, Any]], as_it_is: list[Any]
) -> None:
    """All kernels; parameters of half precision and of double precision as well."""
    kind, kwargs = case
    for option in options(kind):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            if option.get("fused") and kind is OPTIM.SGD and dtype is not torch.float32:
                continue  # torch 2.13 reads memory there that nothing has written
            steps_and_undoes(made(kind, kwargs | option, dtype))


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_step_in_ranges_of_the_real_size(
    kind: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch, as_it_is: list[Any]
) -> None:
    """Two threads share a kernel's work, and the last elements of each meet other instructions."""
    monkeypatch.setattr(slices, "CPU_ELEMENTS", 2**18)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(2**18 + 32_771))
        momentum = {"momentum": 0.9} if kind is OPTIM.SGD else {}  # without, it has no state to invert
        plain = kind([param], lr=0.01, fused=True, **momentum)
        steps_and_undoes(plain)
        assert as_it_is
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_would_be_compiled_is_the_rule(
    case: tuple[type[Optimizer], dict[str, Any]], as_it_is: list[Any]
) -> None:
    """Recorded, and run as it is. Float64 and half precision are left to the rule."""
    kind, kwargs = case
    for option in options(kind):
        steps_and_undoes(made(kind, kwargs | option))
    for option in options(kind)[-1:]:
        if not (option.get("fused") and kind is OPTIM.SGD):
            recorded = len(as_it_is)
            for dtype in (torch.float64, torch.bfloat16):
                steps_and_undoes(made(kind, kwargs | option, dtype))
            assert len(as_it_is) == recorded


@pytest.mark.parametrize("case", [CASES[1], *CASES[4:6], *CASES[8:11]], ids=named)
def test_rules_that_are_compiled(case: tuple[type[Optimizer], dict[str, Any]], as_it_is: list[Any]) -> None:
    """A rule that does something new would be left out unseen. New numbers make no new kernel."""
    kind, kwargs = case
    steps_and_undoes(made(kind, kwargs))
    assert len(as_it_is) == 1, "one kernel, although each step and group has other numbers"


@needs_compiler
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # as torch's compiler is imported
@pytest.mark.parametrize(
    "case",
    [CASES[5], *(pytest.param(case, marks=pytest.mark.thorough) for case in CASES if case is not CASES[5])],
    ids=named,
)
def test_a_compiled_inverse(case: tuple[type[Optimizer], dict[str, Any]]) -> None:
    kind, kwargs = case
    for option in options(kind):
        listed = 0

        def count(wrapped: UndoableOptimizer) -> None:
            nonlocal listed
            window = wrapped._undo.window
            assert window is not None
            listed += sum(
                len(residual.listed)
                for entry in window.entries()
                for residual in (entry.residual or {}).values()
            )

        steps_and_undoes(made(kind, kwargs | option), count)
        assert listed or kind in (Lamb, OPTIM.Rprop)
    assert all(run is not None for run in compiled._COMPILED.values())


def test_without_a_compiler_it_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        def run(*_: Any) -> None:
            raise RuntimeError("No working C++ compiler found\nand a long story")

        return run

    monkeypatch.setattr(torch, "compile", fails)
    with caplog.at_level(logging.WARNING):
        steps_and_undoes(made(OPTIM.AdamW, {"lr": 0.01}))
    (record,) = caplog.records
    assert "No working C++ compiler" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert "install a C++ compiler (g++)" in record.getMessage()


def test_a_copy_is_compiled_as_well() -> None:
    wrapped = wrap_optimizer(made(OPTIM.AdamW, {"lr": 0.01}), exact="compiled")
    assert copy.deepcopy(wrapped)._undo.residuals.compiled
    assert not wrap_optimizer(wrapped, exact=True)._undo.residuals.compiled
