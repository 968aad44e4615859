"""What undo_support says, and that it is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.optim import Optimizer

from swift_ft import undo_support, wrap_optimizer
from swift_ft.optim import Lamb
from swift_ft.testing.undo_rule_conformance import set_grads
from swift_ft.torch_core.optimizers import parameters_of

OPTIM = torch.optim
CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (OPTIM.SGD, {}),
    (OPTIM.SGD, {"momentum": 0.9}),
    (OPTIM.SGD, {"weight_decay": 1000.0}),
    (OPTIM.Adam, {}),
    (OPTIM.AdamW, {}),
    (OPTIM.AdamW, {"amsgrad": True}),
    (OPTIM.AdamW, {"betas": (0.0, 0.999)}),
    (OPTIM.NAdam, {}),
    (OPTIM.NAdam, {"weight_decay": 0.1}),
    (OPTIM.RAdam, {}),
    (OPTIM.Adamax, {}),
    (OPTIM.Adagrad, {}),
    (OPTIM.Adagrad, {"weight_decay": 0.1}),
    (OPTIM.RMSprop, {"centered": True, "momentum": 0.9}),
    (OPTIM.Adadelta, {}),
    (OPTIM.ASGD, {}),
    (OPTIM.Rprop, {}),
    (OPTIM.Muon, {}),
    (OPTIM.Adafactor, {}),
    (OPTIM.SparseAdam, {}),
    (OPTIM.LBFGS, {}),
    (Lamb, {}),
]


def made(kind: type[Optimizer], kwargs: dict[str, Any]) -> Optimizer:
    return kind([torch.nn.Parameter(torch.ones(10, 10))], **kwargs)


def line(kind: type[Optimizer], kwargs: dict[str, Any], exact: bool) -> str:
    support = undo_support(made(kind, kwargs), exact=exact)
    name = f"{support.optimizer} {kwargs or ''}".strip()
    text = f"{name}: {support.method}, {support.extra_bytes_per_element:g} B, "
    text += "exact" if support.exact else "bounded"
    assert bool(support.error) is not support.exact
    return text + (f", journal of {', '.join(support.journaled)}" if support.journaled else "")


def test_the_table() -> None:
    assert_expected_inline(
        "\n".join(line(kind, kwargs, False) for kind, kwargs in CASES),
        """\
SGD: algebra, 0 B, bounded
SGD {'momentum': 0.9}: algebra, 0 B, bounded
SGD {'weight_decay': 1000.0}: journal, 4 B, exact, journal of param
Adam: algebra, 0 B, bounded
AdamW: algebra, 0 B, bounded
AdamW {'amsgrad': True}: algebra and journal, 4 B, bounded, journal of max_exp_avg_sq
AdamW {'betas': (0.0, 0.999)}: algebra and journal, 4 B, bounded, journal of exp_avg
NAdam: algebra, 0 B, bounded
NAdam {'weight_decay': 0.1}: algebra and journal, 4 B, bounded, journal of param
RAdam: algebra, 0 B, bounded
Adamax: algebra and journal, 4 B, bounded, journal of exp_inf
Adagrad: algebra, 0 B, bounded
Adagrad {'weight_decay': 0.1}: algebra and journal, 4 B, bounded, journal of param
RMSprop {'centered': True, 'momentum': 0.9}: algebra, 0 B, bounded
Adadelta: algebra, 0 B, bounded
ASGD: algebra, 0 B, bounded
Rprop: algebra and journal, 8 B, bounded, journal of prev, step_size
Muon: algebra, 0 B, bounded
Adafactor: algebra and journal, 0.8 B, bounded, journal of row_var, col_var
SparseAdam: journal, 12 B, exact, journal of param, exp_avg, exp_avg_sq
LBFGS: journal, 4 B, exact, journal of param, state
Lamb: algebra, 0 B, bounded""",
    )


def test_the_table_of_exact_undos() -> None:
    assert_expected_inline(
        "\n".join(line(kind, kwargs, True) for kind, kwargs in CASES),
        """\
SGD: algebra, 1 B, exact
SGD {'momentum': 0.9}: algebra, 2 B, exact
SGD {'weight_decay': 1000.0}: journal, 4 B, exact, journal of param
Adam: algebra, 3 B, exact
AdamW: algebra, 3 B, exact
AdamW {'amsgrad': True}: algebra and journal, 7 B, exact, journal of max_exp_avg_sq
AdamW {'betas': (0.0, 0.999)}: algebra and journal, 6 B, exact, journal of exp_avg
NAdam: algebra, 3 B, exact
NAdam {'weight_decay': 0.1}: algebra, 3 B, exact
RAdam: algebra, 3 B, exact
Adamax: algebra and journal, 6 B, exact, journal of exp_inf
Adagrad: algebra, 2 B, exact
Adagrad {'weight_decay': 0.1}: algebra, 2 B, exact
RMSprop {'centered': True, 'momentum': 0.9}: algebra, 4 B, exact
Adadelta: algebra, 3 B, exact
ASGD: algebra, 2 B, exact
Rprop: algebra and journal, 9 B, exact, journal of prev, step_size
Muon: algebra, 2 B, exact
Adafactor: algebra and journal, 1.8 B, exact, journal of row_var, col_var
SparseAdam: journal, 12 B, exact, journal of param, exp_avg, exp_avg_sq
LBFGS: journal, 4 B, exact, journal of param, state
Lamb: algebra, 3 B, exact""",
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("kind", "kwargs"), CASES, ids=str)
def test_the_bytes_are_what_is_held(kind: type[Optimizer], kwargs: dict[str, Any], exact: bool) -> None:
    """From the second step on. Residuals may be smaller than predicted, never larger."""
    optimizer = wrap_optimizer(made(kind, kwargs), exact=exact)
    if kind in (OPTIM.LBFGS, OPTIM.SparseAdam):
        assert undo_support(optimizer).method == "journal"
        return
    for seed in range(2):
        set_grads(parameters_of(optimizer), seed, 1e-3)
        promised = undo_support(optimizer).extra_bytes_per_element
        optimizer.step()
    held = optimizer.undo_memory_bytes() / 100
    assert held <= promised + 0.3
    if not exact:
        assert held == pytest.approx(promised)


def test_it_answers_for_the_optimizer_as_it_was_wrapped() -> None:
    optimizer = made(OPTIM.AdamW, {})
    assert not undo_support(optimizer).exact
    assert undo_support(wrap_optimizer(optimizer, exact=True)).exact
    assert undo_support(optimizer).extra_bytes_per_element == 3
    assert undo_support(optimizer, exact=False).to_dict()["method"] == "algebra"
