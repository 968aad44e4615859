"""Scripts under plain torchrun: in place of :class:`swift_ft.Session` they get a loop, and nothing else.

    torchrun --nproc-per-node 2 plain.py STATES ITERATION SCRIPT ARGUMENTS

Each worker writes a digest of each value of its state into the folder STATES when ITERATION iterations are
complete, under the name that a checkpoint has for it. The checkpoint that it is compared with need not be
of the last one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import swift_ft
from swift_ft.checkpoint.plain_classes import kind_of
from swift_ft.checkpoint.state_values import digests_of
from swift_ft.config.worker_context import WorkerContext
from swift_ft.determinism import seed_step
from swift_ft.launch.processes.script_end import finish
from swift_ft.testing.chaos import within
from swift_ft.torch_adapters.pipelining.stage_metadata import learn_shapes_without_trace, stages_of

_ENDS_S = 600.0
STATES = "SWIFT_CHAOS_STATES"
"""The variable that names the folder of digests."""
AT = "SWIFT_CHAOS_AT"
"""The variable that has the number of complete iterations with which they are written."""

_kept: list[object] = []
"""Models of the script, until the interpreter ends.

A DDP model that is freed before, where ``main()`` returns for instance, joins the threads of its group while
it has the lock of the interpreter. If one of them waits for that lock, the worker hangs (torch 2.13).
"""


class PlainStep(contextlib.nullcontext[None]):
    """An iteration that nothing can interrupt."""

    replayed = False

    def __init__(self, index: int, began: int = 0) -> None:
        super().__init__()
        self.index = index
        self.index_in_epoch = index - began

    def once(self, function: Callable[..., object], *args: object) -> None:
        """Nothing is repeated."""
        function(*args)


class PlainSession:
    """The methods of a session, without its work. Steps draw the random numbers that those of a session do.

    In a pipeline a session derives numbers for each microbatch, too: a script that is compared has no dropout
    there.
    """

    def __init__(self, state: object, *, seed: int = 0, **_: object) -> None:
        self.iteration = 0
        self._state = state
        _kept.append(state)
        self._seed, self._parts = seed, list[tuple[Callable[[], Any], int, Callable[[Any], object] | None]]()
        self._stage: Any = None
        self._replicated = self._stopped = self._in_epochs = False
        self._tied: list[nn.Parameter] = []

    def attach_pipeline(self, schedule: Any, **_: object) -> None:
        """Steps of its workers are alike.

        torch learns shapes from a forward pass, for which DDP expects a backward pass: it averages the first
        microbatch's gradients alone then, or ends with an internal error. Neither is what is compared.
        """
        (self._stage,) = stages_of(schedule)
        learn_shapes_without_trace(schedule)

    def attach_ddp(self, model: object) -> None:
        """Steps of its replicas have numbers of their own."""
        self._replicated = True
        _kept.append(model)

    def attach_fsdp(self, model: object) -> None:
        """As for DDP."""
        self._replicated = True

    def tie(self, parameter: nn.Parameter, stages: Sequence[int]) -> None:
        """All stages share it."""
        assert len(stages) == self._stage.group_size, "all stages have to share it"
        self._tied.append(parameter)

    def sum_tied_gradients(self) -> None:
        """By the all-reduce that a script has without a session."""
        for parameter in self._tied:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self._stage.group)

    def between(
        self,
        function: Callable[[], Any],
        *,
        every: int = 1,
        then: Callable[[Any], object] | None = None,
        **_: object,
    ) -> None:
        """Whenever it is due, after a step."""
        self._parts.append((function, every, then))

    def stop(self) -> None:
        """No further step."""
        self._stopped = True

    def steps(self, iterations: int) -> Iterator[PlainStep]:
        """One after the other, and what is between them. What follows an epoch's last one comes later."""
        alike = self._stage is not None and not self._replicated
        began = self.iteration if self._in_epochs else 0
        self._write_state()
        while self.iteration < began + iterations and not self._stopped:
            seed_step(self._seed, self.iteration, None if alike else dist.get_rank())
            yield PlainStep(self.iteration, began)
            self.iteration += 1
            if not self._in_epochs or self.iteration < began + iterations:
                self._do_between()
                self._write_state()

    def epochs(self, count: int) -> Iterator[int]:
        """One after the other."""
        self._in_epochs = True
        for epoch in range(count):
            if self._stopped:
                return
            yield epoch
            self._do_between()
            self._write_state()

    def _write_state(self) -> None:
        if self.iteration != int(os.environ.get(AT, -1)):
            return
        own = Path(os.environ[STATES]) / f"{dist.get_rank()}.json"
        if not own.exists():  # in an epoch that follows, its first lines have run
            own.write_text(json.dumps(digests_of(_saved(self._state), f"worker {dist.get_rank()}")))

    def _do_between(self) -> None:
        for function, every, then in self._parts:
            if self.iteration % every == 0:
                result = function()
                if then is not None:
                    then(result)


def _unwrapped(optimizer: Any, **_: object) -> Any:
    return optimizer


def _never_restarted() -> object:
    return types.SimpleNamespace(started_in=1)


def put_in_place() -> None:
    """In this process, whatever module a script imports them from, an integration for instance."""
    within.put_in_place([(swift_ft.Session, PlainSession), (swift_ft.wrap_optimizer, _unwrapped)])
    replaced: Any = WorkerContext
    replaced.from_env = staticmethod(_never_restarted)


def _saved(state: object) -> dict[str, Any]:
    """All that a checkpoint has of a state, as it names it."""
    models, optimizers = dict[str, Any](), dict[str, Any]()
    groups, parts = dict[str, Any](), dict[str, Any]()
    for name, part in state.items() if isinstance(state, Mapping) else ():
        if isinstance(part, nn.Module):
            own = part.module if isinstance(part, nn.parallel.DistributedDataParallel) else part
            models[name] = _local(own.state_dict())
        elif isinstance(part, Optimizer):
            found = part.state_dict()
            optimizers[name] = {"state": _local(found["state"])}
            groups[name] = {"param_groups": _local(found["param_groups"])}
        elif hasattr(part, "state_dict"):
            parts[name] = _local(part.state_dict())
    return {
        "models": models,
        "optimizers": optimizers,
        "plain": {"bytes": {"optimizers": groups, "small": {"parts": parts}}},
    }


def _local(value: Any) -> Any:
    """Only this worker's part of each tensor."""
    if isinstance(value, Mapping):
        return {key: _local(one) for key, one in value.items()}
    if kind_of(type(value)) == "namedtuple":
        return value._make(map(_local, value))
    if isinstance(value, list | tuple):
        return [_local(one) for one in value]
    return value.to_local() if hasattr(value, "to_local") else value


def main() -> None:
    """Run the script in this process, and end it as a worker of swift-run ends.

    Now and then the end of an interpreter meets a thread of torch's and aborts. The script is done by then.
    """
    os.environ[STATES], os.environ[AT] = sys.argv[1:3]
    put_in_place()
    within.run_within(sys.argv[3:])
    finish(_ENDS_S, lambda awaited: os._exit(1))
    os._exit(0)


if __name__ == "__main__":  # the module of the program is the script's: what is defined here is not of it
    importlib.import_module("swift_ft.testing.chaos.plain").main()
