"""Everything that Lightning's Trainer has counted, logged and remembered, as a part of the session's state.

A Trainer keeps it in many objects: its loops' counters, its callbacks, the sums of logged values, metrics,
the place in the loaders. Parts of it are each worker's own: sums of a logged loss over an epoch, for example.
So at the end of each step all workers give theirs to all others; whoever replaces a lost one goes on with
what that one had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torchmetrics import Metric

from swift_ft.errors import UsageError
from swift_ft.integrations.lightning import host
from swift_ft.integrations.lightning.clocks import OF_HOST, durations, put_back_durations
from swift_ft.integrations.lightning.excess import Excess
from swift_ft.integrations.lightning.log_files import LogFiles
from swift_ft.integrations.lightning.logged_values import logged_values, put_back_logged
from swift_ft.integrations.lightning.plain_text import (
    from_text,
    plain,
    plain_variables,
    put_back,
    restored,
    to_text,
)
from swift_ft.integrations.lightning.saved_files import SavedFiles

_LIMIT = 4 << 20
"""Bytes of one worker's part."""

_OF_TRAINER = ("should_stop", "accumulate_grad_batches")

_Loop = host.part("loops.loop")._Loop
_BaseProgress = host.part("loops.progress")._BaseProgress
_ProgressBar = host.part("callbacks").ProgressBar


class TrainerProgress:
    """See the module.

    Args:
        trainer: whose loop is driven.
        logs: files of its loggers.
        saved: its checkpoints.

    Attributes:
        behind: the trainer is not where this state is, as after a loss or in a replacement.
    """

    def __init__(self, trainer: Any, logs: LogFiles, saved: SavedFiles) -> None:
        self._trainer = trainer
        self._logs = logs
        self._saved = saved
        self._ranks: dict[str, str] = {}  # of each worker, at the end of the last step; none before the first
        self._capacity = 4096  # bytes of each part in the collective, the same on all workers
        self._excess = Excess()
        self._begin = to_text(self._now())
        self.behind = False

    def state_dict(self) -> dict[str, Any]:
        """Each worker's, as text."""
        return {
            "ranks": dict(self._ranks),
            "capacity": self._capacity,
            "versions": self._logs.versions,
            "there": self._saved.there,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The trainer follows when the next step begins."""
        self._ranks, self._capacity = dict(state["ranks"]), state["capacity"]
        self._logs.versions, self._saved.there = dict(state["versions"]), state["there"]
        self.behind = True

    def step_begins(self) -> None:
        """Bring the trainer to where the state is, and finish what the step before has left."""
        self.catch_up()
        self._trainer.fit_loop._data_fetcher.step_begins()
        self._saved.step_begins()

    def catch_up(self) -> None:
        """Bring the trainer to where the state is. A replacement may come after the last step."""
        if self.behind:
            self.behind = False
            self._put_back(from_text(self._ranks.get(str(dist.get_rank()), self._begin)))

    def step_ends(self) -> None:
        """Give this worker's part to all others: no step is complete before all workers come here."""
        text = self._text()
        while (found := self._gathered(text)) is None:
            pass
        self._ranks = found

    def _text(self) -> bytes:
        """The part of this worker, without what is too large."""
        while len(text := to_text(now := self._now()).encode()) > _LIMIT:
            if not self._excess.leave_out_largest(now, self._owners()):
                raise UsageError(
                    f"The Trainer's loops, loggers and logged values hold {len(text):,} bytes between two "
                    f"steps, and the limit is {_LIMIT:,}: log fewer values."
                )
        return text

    def _gathered(self, text: bytes) -> dict[str, str] | None:
        """All workers' texts; None if one was longer than any before, and there is room for it now."""
        own = torch.zeros(8 + self._capacity, dtype=torch.uint8)
        own[:8] = torch.tensor([len(text)]).view(torch.uint8)
        own[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: self._capacity]
        own = own.to(self._trainer.strategy.root_device)
        parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        parts = [part.cpu() for part in parts]
        lengths = [int(part[:8].view(torch.int64)) for part in parts]
        if max(lengths) > self._capacity:
            self._capacity = max(lengths) * 3 // 2
            return None
        texts = (bytes(part[8 : 8 + length].numpy()) for part, length in zip(parts, lengths, strict=True))
        return {str(rank): text.decode() for rank, text in enumerate(texts)}

    def _now(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "loops": {name: plain_variables(loop) for name, loop in _loops(trainer.fit_loop)},
            "counters": {name: plain(counter.state_dict()) for name, counter in _counters(trainer.fit_loop)},
            "trainer": {name: getattr(trainer, name) for name in _OF_TRAINER},
            "connector": plain_variables(trainer._logger_connector),
            "clocks": {name: durations(callback) for name, callback in _callbacks(trainer)},
            "logged": logged_values(trainer.fit_loop.epoch_loop._results),
            "batches": trainer.fit_loop._data_fetcher.place(),
            "logs": self._logs.place(),
            "saved": self._saved.place(),
            **{
                kind: {name: self._variables(kind, name, owner) for name, owner in named.items()}
                for kind, named in self._owners().items()
            },
        }

    def _owners(self) -> dict[str, dict[str, Any]]:
        """The objects that may keep much: by kind, and by name."""
        module = self._trainer.lightning_module
        metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        return {"callbacks": dict(_callbacks(self._trainer)), "module": {"": module}, "metrics": metrics}

    def _variables(self, kind: str, name: str, owner: Any) -> dict[str, Any]:
        found = self._excess.variables(kind, name, owner)
        return {key: form for key, form in found.items() if _travels(kind, key, owner)}

    def _put_back(self, was: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer.training = True  # a loss in a validation leaves it there
        for name, loop in _loops(trainer.fit_loop):
            put_back(loop, was["loops"][name])
        for name, counter in _counters(trainer.fit_loop):
            counter.load_state_dict(restored(was["counters"][name]))
        for name, value in was["trainer"].items():
            setattr(trainer, name, value)
        put_back(trainer._logger_connector, was["connector"])
        put_back_logged(trainer, was["logged"])
        missing = []
        for kind, named in self._owners().items():
            for name, owner in named.items():
                missing += put_back(owner, was[kind].get(name, {}))
                if kind == "metrics":
                    owner._computed = None
        self._excess.say_missing(missing)
        for name, callback in _callbacks(trainer):
            put_back_durations(callback, was["clocks"].get(name, {}))
        trainer.fit_loop._data_fetcher.go_to(was["batches"])
        self._logs.go_to(was["logs"])
        self._saved.go_to(was["saved"])


def _loops(loop: Any, name: str = "fit_loop") -> Iterator[tuple[str, Any]]:
    """A loop and all in it."""
    yield name, loop
    for key, inner in vars(loop).items():
        if isinstance(inner, _Loop):
            yield from _loops(inner, f"{name}.{key}")


def _counters(fit_loop: Any) -> Iterator[tuple[str, Any]]:
    for name, loop in _loops(fit_loop):
        for key, counter in vars(loop).items():
            if isinstance(counter, _BaseProgress):
                yield f"{name}.{key}", counter


def _callbacks(trainer: Any) -> Iterator[tuple[str, Any]]:
    """All but progress bars, which only show what others count."""
    for number, callback in enumerate(trainer.callbacks):
        if not isinstance(callback, _ProgressBar):
            yield f"{number}.{type(callback).__qualname__}", callback


def _travels(kind: str, name: str, owner: Any) -> bool:
    """Whether a plain variable is more than what each worker's script makes, or another part has.

    Of a LightningModule these are the lists and numbers that it keeps, such as outputs of its training steps.
    """
    if kind == "module":
        return not name.startswith("_") and name != "training"
    if kind == "metrics":
        return name in owner._defaults or name == "_update_count"
    return name not in OF_HOST
