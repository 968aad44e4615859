"""The identity of a data set: a run that is continued must have the one with which it began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_ft.errors import UsageError


def identity_of(dataset: Any) -> str:
    """A data set's identity; empty if it tells none.

    Its ``identity`` is taken, as :class:`FileRecords` has one, or the ``_fingerprint`` of Hugging Face's data
    sets, which changes with the data and with each ``map`` and ``filter``.
    """
    return str(getattr(dataset, "identity", None) or getattr(dataset, "_fingerprint", ""))


def check_same(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare what the order of the samples depends on.

    Args:
        saved: by name, in the run that is continued.
        present: by name, now.

    Raises:
        UsageError: for the first that differs: iterations would be given other samples.
    """
    for name, now in present.items():
        before = saved.get(name, now)
        if before != now:
            raise UsageError(
                f"{_WORDS[name]} was {before!r} when this run began, and is {now!r} now: iterations would "
                "get other samples. Give the same again, or begin a new run with a store= of its own."
            )


_WORDS = {
    "samples": "The data set's number of samples",
    "identity": "The data set's identity",
    "batch_size": "The global batch",
    "shards": "The digest of the sizes of the data set's shards",
    "shuffle": "shuffle=",
    "seed": "seed=",
}
