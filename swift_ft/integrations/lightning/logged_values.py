"""The values that a LightningModule has logged in the current epoch, with their sums so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from swift_ft.integrations.lightning.host import part
from swift_ft.integrations.lightning.plain_text import plain, put_back

_result = part("trainer.connectors.logger_connector.result")
_FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_SUMS = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")


def logged_values(results: Any) -> dict[str, Any]:
    """By key: how each was logged, and what has been added up."""
    return {key: _written(result) for key, result in results.items()}


def put_back_logged(trainer: Any, was: Mapping[str, Any]) -> None:
    """Give the trainer the values that it had: a replacement has never logged them."""
    results = trainer.fit_loop.epoch_loop._results
    for key in [key for key in results if key not in was]:
        del results[key]
    for key, written in was.items():
        if key not in results:
            results[key] = _made(trainer, written)
        put_back(results[key], written["sums"])
    results.batch = results.batch_size = results.dataloader_idx = None
    # Those of an interrupted validation: the next one logs all of its own.
    trainer.fit_loop.epoch_loop.val_loop._results.clear()


def _written(result: Any) -> dict[str, Any]:
    meta = result.meta
    sums = {name: plain(getattr(result, name)) for name in _SUMS if hasattr(result, name)}
    return {
        "meta": {name: getattr(meta, name) for name in _FIELDS},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": {"should": meta.sync.should, "op": meta.sync.op, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        "sums": {
            name: form
            for name, form in sums.items()
            if result.is_tensor or name in ("_update_count", "has_reset")
        },
    }


def _made(trainer: Any, written: Mapping[str, Any]) -> Any:
    meta = _result._Metadata(**written["meta"], reduce_fx=getattr(torch, written["reduce_fx"]))
    sync = written["sync"]
    meta.sync = _result._Sync(
        _should=sync["should"],
        fn=trainer.strategy.reduce,
        _op=sync["op"],
        rank_zero_only=sync["rank_zero_only"],
    )
    result = _result._ResultMetric(meta, written["is_tensor"])
    if not written["is_tensor"]:
        result.value = dict(trainer.lightning_module.named_modules())[meta.metric_attribute]
    return result
