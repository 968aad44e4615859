"""The batches of the script's own DataLoaders, in Lightning's order: a step can have its own again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from swift_ft.data.batch_source import random_numbers_of
from swift_ft.data.loader import KeptBatch, copied
from swift_ft.determinism import derive_seed
from swift_ft.errors import UsageError
from swift_ft.integrations.lightning.host import part
from swift_ft.integrations.lightning.order import Order

_fetchers = part("loops.fetchers")
_end_workers = part("utilities.combined_loader")._shutdown_workers_and_reset_iterator


class _Fetched(NamedTuple):
    """A batch that may be asked for again, and whether it is the last one."""

    item: KeptBatch
    done: bool


class RepeatableFetcher(_fetchers._DataFetcher):  # type: ignore[misc,name-defined]
    """Gives batches as Lightning's own fetcher does, and any of them again after a loss.

    Batches of the current step are kept. After any other jump the loaders are read again from the beginning
    of their pass. What data sets draw at random while they are read depends on the seed, the pass, the batch
    and the worker only, and leaves the random numbers of the step as they are.

    Args:
        inner: Lightning's own, set up.
        seed: of what is drawn at random.
        rank: of this worker, among those that have different samples.
        epoch: which one samplers are told.

    Attributes:
        passes: how often the loaders' first batch came, or will come next.
        index: batches given in this pass.
    """

    def __init__(self, inner: Any, seed: int, rank: int, epoch: Callable[[], int]) -> None:
        super().__init__()
        if not isinstance(inner, _fetchers._PrefetchDataFetcher):
            raise UsageError(
                "training_step(dataloader_iter) takes batches by itself, so that a repeated step would get "
                "others: write training_step(batch, batch_idx)."
            )
        self._inner = inner
        self._combined_loader = inner._combined_loader
        self._seed, self._rank = seed, rank
        self._order = Order(inner._combined_loader.flattened, seed)
        self._epoch = epoch
        self.passes = self.index = 0
        self._place: tuple[int, int] | None = (
            None  # of the inner one: its pass, and the batch that comes next
        )
        self._kept: dict[int, _Fetched] = {}

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        self.index = 0
        self._kept = {}
        self._begin()
        self.fetched, self.done, self.length = self._inner.fetched, self._inner.done, self._inner.length
        return self

    def __next__(self) -> Any:
        found = self._kept.get(self.index)
        if found is None or not found.item.unchanged:
            found = self._kept[self.index] = self._read()
        self.index += 1
        self.fetched += 1
        self.done = found.done
        return copied(found.item.batch)

    def step_begins(self) -> None:
        """Batches before this one are not asked for again."""
        self._kept = {place: kept for place, kept in self._kept.items() if place >= self.index}

    def place(self) -> dict[str, Any]:
        """The pass and the batch that it is at, and what the order depends on besides."""
        return {
            "passes": self.passes,
            "index": self.index,
            "fetched": self.fetched,
            "script_seed": self._order.script_seed,
            "epochs": self._order.epochs_told(),
        }

    def go_to(self, place: dict[str, Any]) -> None:
        """Go on from there."""
        another_order = self._order.tell_epochs(place["epochs"])
        if place["script_seed"] != self._order.script_seed:
            self._order.script_seed = place["script_seed"]
            another_order = True
        if another_order:
            self._place = None
        if another_order or place["passes"] != self.passes:
            self._kept = {}
        self.passes, self.index, self.fetched = place["passes"], place["index"], place["fetched"]

    def reset(self) -> None:
        """As Lightning's own."""
        self._kept = {}
        self._place = None
        self._inner.reset()

    def teardown(self) -> None:
        """As Lightning's own."""
        self._kept = {}
        self._place = None
        self._inner.teardown()

    def _begin(self) -> None:
        self._order.begin(self.passes, self._epoch())
        for loader in self._combined_loader.flattened:
            # Workers that live on would draw on from the pass before, and those of a replacement would not.
            if getattr(loader, "persistent_workers", False):
                _end_workers(loader)
        with self._order.drawing(), self._random(-1):
            iter(self._inner)
        self._place = (self.passes, 0)

    def _read(self) -> _Fetched:
        if self._place is None or self._place[0] != self.passes or self._place[1] > self.index:
            self._begin()
        assert self._place is not None
        for index in range(self._place[1], self.index + 1):
            # The loop has given them to this object.
            self._inner._start_profiler = self._start_profiler
            self._inner._stop_profiler = self._stop_profiler
            with self._order.drawing(), self._random(index):
                batch = next(self._inner)
            self._place = (self.passes, index + 1)
        return _Fetched(KeptBatch(batch), self._inner.done)

    def _random(self, index: int) -> Any:
        return random_numbers_of(derive_seed(self._seed, self.passes, index, self._rank))
