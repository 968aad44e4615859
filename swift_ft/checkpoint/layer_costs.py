"""Costs of a model's layers in a run, kept in the store for the runs that come after it.

runs/<run>/layers.json     as ``swift-run --layers-out`` writes it, so that ``swift-plan`` reads it, too
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence

import torch.distributed as dist

from swift_ft.checkpoint.run_record import read_record, run_directory
from swift_ft.config.worker_context import WorkerContext
from swift_ft.costs.layer_profile import LayerProfile, layers_from_json, layers_to_json
from swift_ft.errors import NotLaunchedError, SwiftError, UsageError, first_line
from swift_ft.storage.read_only import ReadOnlyStore
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)


def keep_layers(store: Store, run_id: str, layers: Sequence[LayerProfile]) -> None:
    """Write or replace the costs of the layers of a run's model."""
    store.write_json(_path(run_id), json.loads(layers_to_json(layers)))


def measured_costs(store: str | os.PathLike[str], count: int) -> tuple[LayerProfile, ...] | None:
    """The cost of each layer in the newest run of a store, for a :class:`LayerStack` to begin with.

    The stages of a run are then balanced from the first iteration on, and none begins with layers that its
    machine has no memory for, if that can be. A first run needs no other script:

        swift_ft.LayerStack(build_layer, count=26, costs=swift_ft.measured_costs(args.store, 26))

    All workers call it, after ``init_process_group``. Worker 0 looks, and all get what it has found.

    Args:
        store: URL or path of the store, of this run or of another one.
        count: layers of the whole model.

    Returns:
        Of each layer the time of a microbatch, the bytes of its state, and those that a microbatch keeps.
        None if no run of the store has measured a model of so many layers, as in an empty store.

    Raises:
        UsageError: before ``init_process_group``, or if the store cannot be read.
    """
    if not dist.is_initialized():
        raise UsageError("Call dist.init_process_group(backend) before swift_ft.measured_costs().")
    found: list[tuple[LayerProfile, ...] | str | None] = [None]
    if dist.get_rank() == 0:
        found = [_costs_or_error(store, count)]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], str):
        raise UsageError(found[0])
    return found[0]


def _costs_or_error(url: str | os.PathLike[str], count: int) -> tuple[LayerProfile, ...] | str | None:
    """The costs in a store, or the error that all workers are to raise."""
    try:
        store = ReadOnlyStore(url)
        return _newest(store, count)
    except UsageError as error:  # says the store and the remedy
        return str(error)
    except Exception as error:  # clients raise all kinds of errors, and the other workers wait for an answer
        return f"The costs of layers cannot be read: {first_line(error)}"


def _newest(store: Store, count: int) -> tuple[LayerProfile, ...] | None:
    if (record := read_record(store)) is None:
        return None
    for run_id in (record["run_id"], *reversed(record["earlier"])):
        if run_id == _own_run():  # it began without: where all start again, they begin as they did
            continue
        if (layers := _read(store, _path(run_id))) is None:
            continue
        if len(layers) == count:
            _logger.info(
                "the layers' costs are those of run %s", run_id, extra={"event": "layer_costs_found"}
            )
            return layers
    return None


def _own_run() -> str | None:
    with contextlib.suppress(NotLaunchedError):
        return WorkerContext.from_env().run_id
    return None


def _read(store: Store, path: str) -> tuple[LayerProfile, ...] | None:
    """The layers in a file; None without one, or if it is damaged."""
    try:
        content = store.read_json(path)
        return None if content is None else layers_from_json(json.dumps(content), path)
    except SwiftError as error:  # no store's error, but the file's
        _logger.warning(
            "%s of %s is left out: %s",
            path,
            store.url,
            first_line(error),
            extra={"event": "layer_costs_left_out"},
        )
        return None


def _path(run_id: str) -> str:
    return f"{run_directory(run_id)}/layers.json"
