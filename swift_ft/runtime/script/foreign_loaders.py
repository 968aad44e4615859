"""Loaders of batches that communicate with other workers, which a repeated iteration cannot do.

Accelerate's prepared loaders do: one kind broadcasts every batch, the other the random state whenever an
epoch begins. A replacement would wait there for workers that are in the middle of theirs.
"""

from __future__ import annotations

import gc
import sys

from swift_ft.errors import UnsupportedError

_ACCELERATE = "accelerate.data_loader"


def refuse_loaders_that_communicate() -> None:
    """Look for such loaders in this process. Costs nothing where accelerate is not imported.

    Raises:
        UnsupportedError: there is one; says what to do instead.
    """
    if (module := sys.modules.get(_ACCELERATE)) is None:
        return
    dispatcher, shard = module.DataLoaderDispatcher, module.DataLoaderShard
    for found in gc.get_objects():
        kind = type(found)  # isinstance() would ask proxies
        if issubclass(kind, dispatcher) or (issubclass(kind, shard) and found.rng_types):
            raise UnsupportedError(
                f"accelerate's {kind.__name__} communicates with all workers while it is read, in which a "
                "replacement would wait for ever: prepare() the model and the optimizer without the "
                "DataLoader, and look batches up by step.index."
            )
