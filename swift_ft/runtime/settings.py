"""The arguments of a session, and the checks that name what is wrong with them."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn

from swift_ft.checkpoint.step.rollback import CheckStep
from swift_ft.costs.chain_profile import read_groups
from swift_ft.errors import UnsupportedError, UsageError
from swift_ft.logging import Compress, LogBudget, LogOptions, Ship
from swift_ft.runtime.checkpoints.housekeeping import KeepLogs
from swift_ft.runtime.memory.interval import AUTO
from swift_ft.runtime.pipeline.script_communication import LIMIT_BYTES
from swift_ft.runtime.state_proof import Verify
from swift_ft.runtime.verify.part import OnCorruption
from swift_ft.torch_adapters.fsdp import refuse_wrapped_shards
from swift_ft.torch_adapters.wrappers import unwrapped_model
from swift_ft.units import parse_bytes

E = TypeVar("E", bound=StrEnum)
P = ParamSpec("P")
R = TypeVar("R")

_SMALLEST_BUDGET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a session, checked.

    Attributes:
        checkpoint_every: iterations between two global checkpoints.
        keep_checkpoints: committed checkpoints to keep.
        seed: of all random state inside steps.
        log: how messages are logged; the budget is this worker's share.
        recovery_groups: the group of each machine; machines of one group recover together.
        check_step: in which steps all that they change is compared bit by bit.
        check_data: whether a repeated iteration must get the batch that it had.
        snapshot_every: iterations between two copies to another machine's memory, or ``"auto"``; None for no
            copies.
        script_log_limit_bytes: how much a group of the script may give to a worker in one iteration and still
            be logged.
        keep_logs: which part of the logs stays when a checkpoint is committed.
        verify: whether the training state is compared with what it should be.
        verify_every: iterations between two steps that are computed twice; 0 for none.
        on_corruption: what follows when a machine has computed something wrong.
    """

    checkpoint_every: int
    keep_checkpoints: int
    seed: int
    log: LogOptions
    recovery_groups: tuple[int, ...]
    verify: Verify
    check_data: bool = True
    check_step: CheckStep = CheckStep.FIRST
    snapshot_every: int | str | None = None
    keep_logs: KeepLogs = KeepLogs.NEWEST
    script_log_limit_bytes: int = LIMIT_BYTES
    verify_every: int = 0
    on_corruption: OnCorruption = OnCorruption.WARN


def with_named_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """A method of the session whose unknown or missing arguments are a mistake of the user."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(*args: P.args, **arguments: P.kwargs) -> R:
        try:
            signature.bind(*args, **arguments)
        except TypeError as error:
            name = "Session" if method.__name__ == "__init__" else f"session.{method.__name__}"
            known = ", ".join(list(signature.parameters)[1:])
            raise UsageError(f"{name}(): {error}. Its arguments are: {known}.") from None
        return method(*args, **arguments)

    return checked


def check_store(store: object) -> None:
    """Refuse what is neither a URL nor a path."""
    if not isinstance(store, str | os.PathLike) or not os.fspath(store):
        raise UsageError(
            f"store takes a URL or a path that all machines reach, like 's3://bucket/run', not {store!r}."
        )


def check_state(state: Mapping[str, Any]) -> None:
    """Refuse an empty state, and objects that cannot be saved and loaded."""
    if not isinstance(state, Mapping):
        raise UsageError(
            'The session takes what it protects by name: {"model": model, "optimizer": optimizer}, '
            f"not a {type(state).__name__}."
        )
    if not state:
        raise UsageError('The session has nothing to protect: give it {"model": ..., "optimizer": ...}.')
    for name, part in state.items():
        refuse_wrapped_shards(f"The state's {name!r}", part)
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(part).__mro__):
            raise UnsupportedError(
                f"{name!r} is a ZeroRedundancyOptimizer, which keeps each part of its state on one replica "
                "only: a lost part could not be restored. Use the optimizer that it wraps."
            )
        if isinstance(part, nn.Module):
            _check_names(name, unwrapped_model(part))
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(f"{name!r} has no state_dict() and load_state_dict(): a {type(part).__name__}.")


def _check_names(name: str, model: nn.Module) -> None:
    """Refuse a wrapper that saves under other names than it has: what it saved could not be loaded."""
    if type(model).state_dict is nn.Module.state_dict:
        return  # a hook may change what it saves, with the help of all workers (`torch_core/model_state.py`)
    own = nn.Module.state_dict(model)
    if strange := [key for key in model.state_dict() if key not in own]:
        raise UnsupportedError(
            f"{name!r} is a {type(model).__name__}, which saves {strange[0]!r} and has no tensor of that "
            "name: pass the module that it wraps (Lightning Fabric: model.module)."
        )


def snapshot_interval(every: int | str | None) -> int | str | None:
    """Refuse what is neither a number of iterations nor ``"auto"``."""
    if every is None or every == AUTO:
        return every
    check_at_least_one(snapshot_every=every)
    return every


def check_at_least_one(**numbers: object) -> None:
    """Refuse what is not a whole number from 1 on, by the name of its argument."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise UsageError(f"{name} must be a whole number, not {number!r}.")
        if number < 1:
            raise UsageError(f"{name} must be at least 1, not {number}.")


def log_options(
    budget: int | str | LogBudget,
    ship: str,
    local: str | os.PathLike[str] | None,
    compress: str,
    workers: int,
) -> LogOptions:
    """The options of a worker's log, from a session's arguments. Workers share a machine's budget equally."""
    if isinstance(budget, str):
        budget = parse_bytes(budget)
    if isinstance(budget, int):
        budget = LogBudget(budget, budget)
    if not isinstance(budget, LogBudget):
        raise UsageError(f"log_budget_bytes takes bytes, such as '4GB', or a LogBudget, not {budget!r}.")
    share = budget.of_worker(workers)
    for name, size in (("memory", share.memory_bytes), ("disk", share.disk_bytes)):
        if size is not None and size < _SMALLEST_BUDGET_BYTES:
            raise UsageError(
                f"log_budget_bytes gives a worker {size} bytes of {name}: it needs at least 1 MiB."
            )
    place = Path(local) if local is not None else None
    return LogOptions(
        share,
        ship=choice("ship", ship, Ship),
        local=place,
        compress=choice("compress", compress, Compress),
    )


def script_log_limit(limit: int | str) -> int:
    """The bytes that a session's argument names."""
    size = parse_bytes(limit) if isinstance(limit, str) else limit
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise UsageError(f"script_log_limit_bytes takes bytes, such as '1MiB', not {limit!r}.")
    return size


def recovery_groups(
    groups: str | os.PathLike[str] | Sequence[Sequence[int]] | None, machines: int
) -> tuple[int, ...]:
    """The group of each machine, by slot."""
    if groups is None:
        return tuple(range(machines))
    if isinstance(groups, str | os.PathLike):
        groups = read_groups(Path(groups))
    if sorted(slot for group in groups for slot in group) != list(range(machines)):
        raise UsageError(
            f"groups must name each of the {machines} machines once, 0 to {machines - 1}: {groups}."
        )
    return tuple(next(i for i, group in enumerate(groups) if slot in group) for slot in range(machines))


def choice(name: str, value: str, kind: type[E]) -> E:
    """The member of an enumeration that an argument names."""
    if value not in list(kind):
        known = ", ".join(repr(str(choice)) for choice in kind)
        raise UsageError(f"{name} must be one of {known}, not {value!r}.")
    return kind(value)
