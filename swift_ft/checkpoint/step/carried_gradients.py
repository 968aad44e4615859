"""Gradients at the beginning of a step: stale ones that the step zeroes, or ones that it uses once more.

``optimizer.zero_grad()`` may be the last line of a step or the first one, before or after the forward pass.
In each case a parameter has no gradient, or zeros, when the first new one is about to be added. A script
that adds to the gradients of an earlier step would count them twice in a repeated one. One that updates with
them before it computes new ones would lose them: no checkpoint has gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.step_failures import step_failures
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import sparse_values, version_of

_SAMPLE = 64


class CarriedGradients:
    """Looks at the gradient of each parameter when a step first adds to it, and as it updates with it."""

    def __init__(self) -> None:
        self._stale: dict[torch.Tensor, torch.Tensor | None] = {}  # shards' own are held, to tell them again
        # Where all elements are looked at: gradients, which are not held, and their counts of changes.
        self._unused: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int, str]] = {}
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._closely = False

    def begin(self, named: Mapping[str, nn.Parameter], *, closely: bool) -> None:
        """A step begins.

        Args:
            named: all parameters, by the names that an error calls them.
            closely: look at all elements of a gradient, not at a sample.
        """
        self._closely = closely
        self._stale, self._unused = {}, {}
        for name, parameter in named.items():
            if parameter.grad is None:
                continue
            self._stale[parameter] = parameter.grad if isinstance(parameter, DTensor) else None
            if closely and not isinstance(parameter, DTensor):
                self._unused[parameter] = weakref.ref(parameter.grad), version_of(parameter.grad), name
            if parameter not in self._handles and parameter.requires_grad:
                self._handles[parameter] = parameter.register_hook(
                    lambda _, parameter=parameter, name=name: self._before_accumulation(parameter, name)
                )

    def refuse_carried(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before an optimizer updates with its gradients, or after it if its closure computes them.

        Nothing tells when FSDP adds to the gradient of a shard.

        Args:
            parameters: which it has.

        Raises:
            UnsupportedError: it still has the very gradient of the step before.
        """
        if self._unused:
            self._refuse_unused(parameters)
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                continue
            stale = self._stale.pop(parameter, None)
            if stale is not None and parameter.grad is stale and self._any(stale):
                raise UnsupportedError(
                    "A sharded parameter has the gradient tensor of the step before. So gradients "
                    "may be carried over, which a repeated step would count twice: call "
                    "optimizer.zero_grad(), with its default set_to_none=True, inside `with step:`.",
                    alike=True,
                )

    def forget(self) -> None:
        """The parameters are others from now on."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._stale.clear()
        self._unused.clear()

    def _refuse_unused(self, parameters: Iterable[torch.Tensor]) -> None:
        """Whether the step has computed new gradients: only where it is looked at closely, for the time."""
        for parameter in parameters:
            noted, version, name = self._unused.pop(parameter, (None, 0, ""))
            gradient = parameter.grad
            if noted is None or gradient is None or noted() is not gradient:
                continue
            assert gradient is not None  # mypy takes it for what the reference may give
            if parameter not in self._stale:
                continue  # a new one was added: buckets of DDP may be the very tensors of before
            if version_of(gradient) == version and self._any(gradient):
                raise UnsupportedError(
                    f"The gradient of {name} is carried over from the step before: the optimizer steps "
                    "with it before this step computes one. No checkpoint has gradients, so a loss would "
                    "leave an update out: let backward(), optimizer.step() and optimizer.zero_grad() of "
                    "one batch be in one `with step:`.",
                    alike=True,
                )

    def _before_accumulation(self, parameter: nn.Parameter, name: str) -> None:
        if parameter not in self._stale:
            return  # it had none, or this is not the first time in this step
        del self._stale[parameter]
        if parameter.grad is not None and self._any(parameter.grad):
            error = UnsupportedError(
                f"The gradient of {name} is carried over from the step before, which a repeated step would "
                "count twice: call optimizer.zero_grad() inside `with step:`, or put all backward passes of "
                "an accumulation into one `with step:`.",
                alike=True,
            )
            step_failures.note(error)  # a schedule makes an error of its own of what a backward pass raises
            raise error

    def _any(self, gradient: torch.Tensor) -> bool:
        here = local(gradient).detach()
        if here.layout == torch.strided and not self._closely and here.is_contiguous():
            flat = here.view(-1)
            here = flat[:: max(1, flat.numel() // _SAMPLE)]
        return bool((sparse_values(here) if here.layout == torch.sparse_coo else here).any())
