"""Support of each optimizer: what an undo costs and how exact it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.torch_core.tensors import parts_of
from swift_ft.undo.copies import room_bytes
from swift_ft.undo.registry import rule_for
from swift_ft.undo.rules.rule import PARAM, Rule
from swift_ft.undo.snapshot import size_bytes


@dataclass(frozen=True)
class UndoSupport:
    """The way in which an optimizer's step is undone.

    Attributes:
        optimizer: the class's name.
        method: ``algebra``, ``algebra and journal``, or ``journal``.
        journaled: the parts that are copied before the step: ``param``, or keys of the state.
        extra_bytes_per_element: snapshots and residuals, per element of the parameters, averaged over all
            parameters that get a gradient. Overflows of a residual add well below 0.1 bytes. With ``exact``,
            copies of what is small count in full, as far as other optimizers leave room for them.
        exact: the undo restores every bit.
        error: the error where it does not, in words.
        wait_free: single parameters can be updated and undone.
    """

    optimizer: str
    method: str
    journaled: tuple[str, ...]
    extra_bytes_per_element: float
    exact: bool
    error: str
    wait_free: bool

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def undo_support(optimizer: Optimizer, *, exact: bool | None = None) -> UndoSupport:
    """Describes how a step of an optimizer would be undone, as it is configured now.

    Args:
        optimizer: any optimizer, wrapped or not.
        exact: answer for ``wrap_optimizer(optimizer, exact=...)``; by default as it was wrapped, else False.

    Returns:
        Method, memory and error; nothing is changed.
    """
    options = vars(optimizer).get("_swift_undo")
    if exact is None:
        exact = bool(options and options.exact)
    kind = getattr(optimizer, "_plain_class", type(optimizer))
    rule = rule_for(kind)
    if rule is None:
        return _by_journal(optimizer, kind.__name__)
    all_journaled: set[str] = set()
    extra = elements = 0
    computed_any = False
    room: float = room_bytes(without=options.copies if options else None)
    for group in optimizer.param_groups:
        size = _bytes_here(rule, optimizer, group)
        copied = exact and size <= room and not (rule.keeps_rows or group.get("differentiable"))
        room -= size if copied else 0
        for param in group["params"]:
            parts = _parts(rule, param, optimizer.state.get(param) or {}, group)
            journaled = _journaled(rule, param, parts, group, optimizer.state.get(param) or {}, exact)
            journaled = set(parts) if copied else journaled
            computed = parts.keys() - journaled
            computed_any |= bool(computed)
            all_journaled |= journaled
            extra += sum(parts[key] for key in journaled)
            extra += param.numel() * len(computed) * exact
            elements += param.numel()
    bit_exact = exact or not computed_any
    return UndoSupport(
        optimizer=kind.__name__,
        method="journal" if not computed_any else "algebra and journal" if all_journaled else "algebra",
        journaled=tuple(key for key in (PARAM, *rule.keys) if key in all_journaled),
        extra_bytes_per_element=extra / max(elements, 1),
        exact=bit_exact,
        error="" if bit_exact else rule.error,
        wait_free=True,
    )


def _bytes_here(rule: Rule, optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Bytes that copies of a group would take: of a sharded parameter, those of this worker's part."""
    total = 0.0
    for param, part in zip(group["params"], parts_of(group["params"]), strict=True):
        whole = sum(_parts(rule, param, optimizer.state.get(param) or {}, group).values())
        total += whole * part.numel() / max(param.numel(), 1)
    return total


def _parts(rule: Rule, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> dict[str, int]:
    """Bytes of the parts that a step changes; before the first step those that it will make."""
    sizes = {PARAM: size_bytes(param)}
    if state:
        held = {key: state.get(key) for key in rule.keys}
        return sizes | {key: size_bytes(value) for key, value in held.items() if isinstance(value, Tensor)}
    shaped = {key: size_bytes(param) for key in rule.keys if rule.makes(key, group)}
    return sizes | shaped | rule.sizes(param)


def _journaled(
    rule: Rule,
    param: Tensor,
    parts: dict[str, int],
    group: dict[str, Any],
    state: dict[str, Any],
    exact: bool,
) -> set[str]:
    if rule.is_fully_journaled(param, group) or rule.keeps_rows:
        return set(parts)
    return set(parts.keys() & rule.journaled_for(param, state, group, exact))


def _by_journal(optimizer: Optimizer, name: str) -> UndoSupport:
    """Without a rule: parameters and all of the state, as it is now."""
    elements = copied = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            elements += param.numel()
            copied += size_bytes(param)
    copied += sum(_bytes_below(value) for value in optimizer.state.values())
    return UndoSupport(name, "journal", (PARAM, "state"), copied / max(elements, 1), True, "", False)


def _bytes_below(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return size_bytes(value)
    if isinstance(value, dict):
        return sum(map(_bytes_below, value.values()))
    return sum(map(_bytes_below, value)) if isinstance(value, (list, tuple)) else 0
