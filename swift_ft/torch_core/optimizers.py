"""Private parts of torch's optimizers that an undo or a wrapped ``step`` needs.

Private parts used (tested on torch 2.11 to 2.14):

- ``torch.optim._muon._zeropower_via_newtonschulz``, ``._adjust_lr``: Muon's orthogonalization and its step
  size. The inverse must run the same kernels, and they have no public name.
- ``torch.optim.optimizer._default_to_fused_or_foreach``: which kernel a step picks if the user picked none.
- ``Optimizer.profile_hook_step`` and the mark ``hooked``: how torch puts step hooks around a class's step.
- ``_optimizer_step_pre_hooks``, ``_optimizer_step_post_hooks`` on an optimizer: the hooks of its own, which
  are called behind those of all optimizers. A step looks at the first ones when it comes to them.
- ``_init_group`` on an optimizer's class: makes the state of a step.
- ``_wrapped_by_lr_sched`` on a step, ``_opt_called`` and ``_zero_grad_profile_name`` on an optimizer: how a
  learning rate scheduler notes that it patched the step, and that the step was called.
- ``_params`` and ``_numel_cache`` of an ``LBFGS``: the list of its group's parameters, and their elements.
- ``_need_device_dtype_check_for_fused`` on an optimizer: its first step with a fused kernel clears it.

`undo/` stands on this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer, _muon
from torch.optim.optimizer import _default_to_fused_or_foreach

_BOOKKEEPING = frozenset(
    {
        *("step", "_opt_called", "_zero_grad_profile_name", "grad_scale", "found_inf"),
        "_need_device_dtype_check_for_fused",
    }
)
_OF_LBFGS = frozenset({"_params", "_numel_cache"})

_BEHIND = -1
"""Among the numbers of an optimizer's hooks. torch counts from 0."""


def bookkeeping_of(optimizer: Optimizer) -> frozenset[str]:
    """Attributes of an optimizer that are not its state.

    Schedulers, scalers and profilers set them, or torch's own classes make them of what the groups have.
    """
    return _BOOKKEEPING | _OF_LBFGS if isinstance(optimizer, LBFGS) else _BOOKKEEPING


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def orthogonalized(
    update: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Muon's update of a 2-D parameter: the nearest orthogonal matrix by Newton-Schulz, in bfloat16."""
    return _muon._zeropower_via_newtonschulz(update, coefficients, steps, eps)


def orthogonalized_step_size(lr: float, adjust: str | None, shape: torch.Size) -> float:
    """Muon's learning rate for a parameter of a shape."""
    return _muon._adjust_lr(lr, adjust, shape)


def picks_foreach(params: Iterable[torch.Tensor], *, differentiable: bool) -> bool:
    """Whether a step uses multi-tensor kernels when neither ``foreach`` nor ``fused`` was given."""
    return _default_to_fused_or_foreach(list(params), differentiable, use_fused=False)[1]


def with_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A class's step with torch's pre and post hooks around it, which torch will not add a second time."""
    hooked = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]  # torch's mark
    return hooked


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer has hooks of its own around its step."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, kind, None) for kind in kinds)


def call_behind_hooks(optimizer: Optimizer, function: Callable[[], object]) -> None:
    """Have a function called once, when all pre-hooks have run that others have registered.

    Args:
        optimizer: of a step that has come to a pre-hook of all optimizers, which calls this.
        function: it is called in that step, or in the next one if this one fails before.
    """
    hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks
    hooks.pop(_BEHIND, None)
    # With the last one: behind a further one, it could not remove itself, nor add another one. To put another
    # function in its place changes no order, while torch goes through them.
    last = next(reversed(hooks), _BEHIND)
    hook = getattr(hooks.get(last), "stands_for", hooks.get(last))

    def behind(*args: Any) -> Any:
        if hook is None:
            hooks.pop(_BEHIND, None)  # no longer there when somebody looks which hooks a script has
        elif hooks.get(last) is behind:
            hooks[last] = hook
        found = None if hook is None else hook(*args)
        function()
        return found

    behind.stands_for = hook  # type: ignore[attr-defined]
    hooks[last] = behind


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """A class's ``step`` without torch's hooks around it."""
    step: Callable[..., Any] = inspect.unwrap(kind.step, stop=lambda step: not getattr(step, "hooked", False))
    return step


def makes_same_state(kind: type[Optimizer], parent: type[Optimizer]) -> bool:
    """Whether a class makes its state as its parent does."""
    return _uncompiled(getattr(kind, "_init_group", None)) is _uncompiled(
        getattr(parent, "_init_group", None)
    )


def _uncompiled(method: Any) -> Any:
    """A method without what ``torch.compile`` puts around it, in each of torch's own classes apart."""
    while getattr(method, "__globals__", {}).get("__name__", "").startswith("torch._dynamo."):
        method = method.__wrapped__
    return method


def is_patched_by_scheduler(step: Callable[..., Any]) -> bool:
    """Whether a learning rate scheduler put this step on the instance."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_as_patched_by_scheduler(step: Callable[..., Any]) -> None:
    """Keep schedulers from patching this step: it reports its calls itself (:func:`note_step_called`)."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's mark


def note_step_called(optimizer: Optimizer) -> None:
    """Set the mark without which a scheduler warns that it was called ahead of the optimizer."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's mark


def contained(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that a container of optimizers calls, in its order; empty for any other optimizer.

    A container has the parameters of all of them and no state beside theirs. Its ``state_dict()`` has a form
    of its own (flat, in torchtitan's), and may step an optimizer whose state is still empty: it is not asked.
    """
    if type(optimizer).state_dict is Optimizer.state_dict or optimizer.state:
        return []
    attributes = vars(optimizer).values()
    lists = [
        [*(v.values() if isinstance(v, dict) else v)]
        for v in attributes
        if isinstance(v, list | tuple | dict)
    ]
    own = {id(parameter) for parameter in parameters_of(optimizer)}
    for inner in lists:
        if inner and all(isinstance(one, Optimizer) for one in inner):
            held = [id(parameter) for one in inner for parameter in parameters_of(one)]
            if len(held) == len(own) and own == {*held}:
                return inner
    return []
