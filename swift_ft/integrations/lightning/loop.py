"""Lightning's loop of epochs, driven by the steps of a session.

    for step in session.steps(...):              Lightning's methods, unchanged, in its order
        with step:
            begin an epoch, if one is due        on_advance_start, epoch_loop.reset, epoch_loop.on_run_start
            batches until an optimizer stepped   epoch_loop.advance, epoch_loop.on_advance_end (validates)
            end the epoch, if it was the last    on_advance_end
            tell all others where this worker is

So an epoch's beginning and end, and a validation, belong to the step beside them: a loss in them repeats it.
"""

from __future__ import annotations

import math
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.integrations.lightning.batches import RepeatableFetcher
from swift_ft.integrations.lightning.host import part
from swift_ft.integrations.lightning.protection import Protection
from swift_ft.integrations.lightning.refusals import refuse_another_beginning

_FitLoop = part("loops.fit_loop")._FitLoop

_ENDLESS = 2**53
"""Iterations, where only the Trainer knows when it ends."""


class RepeatableFitLoop(_FitLoop):  # type: ignore[misc,valid-type]
    """Lightning's own loop, whose steps can be repeated. :func:`drive` makes one of a Trainer's."""

    _data_fetcher: Any
    _in_epoch: bool
    _over: bool
    _protection: Protection

    def run(self) -> None:
        """As Lightning's own."""
        refuse_another_beginning(self.trainer)
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self.on_run_start()
        session, progress = self._protection.start(self.trainer)
        for step in session.steps(self._most_updates()):
            with step:
                progress.step_begins()
                resumed = self._protection.has_stopped_before()
                if resumed:  # a callback may say it again
                    self.trainer.should_stop = False
                if not (resumed and self.done):
                    self._update()
                self._over = not self._in_epoch and self.done
                if self._over:
                    self._protection.stop_after_this_step()
                progress.step_ends()
        progress.catch_up()
        if not self._over:
            raise UsageError(
                "on_train_batch_start() has ended epochs before their first update, so that more updates "
                "were left than Trainer(max_steps=...) allows for: give Trainer(max_epochs=...), too."
            )
        self._protection.end()
        self._restarting = False
        self.on_run_end()

    def setup_data(self) -> None:
        """As Lightning's own."""
        before = self._data_fetcher
        super().setup_data()
        if self._data_fetcher is not None and self._data_fetcher is not before:
            self._data_fetcher = RepeatableFetcher(
                self._data_fetcher,
                self._protection.seed,
                self.trainer.distributed_sampler_kwargs["rank"],
                lambda: self.epoch_progress.current.processed,
            )
            iter(self._data_fetcher)

    def _most_updates(self) -> int:
        """Iterations of the session, at most. The Trainer itself says when it is done."""
        if self.max_epochs not in (None, -1) and math.isfinite(self.max_batches):
            accumulated = self.trainer.accumulate_grad_batches
            return int(self.max_epochs * max(1, math.ceil(self.max_batches / accumulated)))
        return int(self.max_steps) if self.max_steps != -1 else _ENDLESS

    def _update(self) -> None:
        """One update: the batches until an optimizer has stepped, or the epoch ends."""
        loop = self.epoch_loop
        if not self._in_epoch:
            self.on_advance_start()
            loop.reset()
            loop.on_run_start(self._data_fetcher)
            self._in_epoch = True
        before = loop.global_step
        while not loop.done:
            try:
                loop.advance(self._data_fetcher)
                loop.on_advance_end(self._data_fetcher)
            except StopIteration:
                self._end_epoch()
                return
            finally:
                loop.on_iteration_done()
            if loop.global_step != before:
                break
        if loop.done:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._in_epoch = False
        try:
            self.on_advance_end()
        finally:
            self.on_iteration_done()


def drive(fit_loop: Any, protection: Protection) -> None:
    """Make a Trainer's own loop one whose steps can be repeated."""
    # Its class, not another object: the Trainer, its progress bars and checkpoints refer to this one.
    fit_loop.__class__ = RepeatableFitLoop
    fit_loop._in_epoch = fit_loop._over = False
    fit_loop._protection = protection
