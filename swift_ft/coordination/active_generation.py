"""The generation whose process group a worker is in."""

from __future__ import annotations

from swift_ft.recovery.orders import WorkerOrder


class ActiveGeneration:
    """The generation whose group this worker is in or is forming, and the order under which it does so.

    The training thread writes it; the journal thread reads it to see whether the generation is over.
    """

    def __init__(self) -> None:
        # Both facts in one reference, so that a reader never sees one without the other.
        # Owner: the training thread; read by the journal thread.
        self._entered: tuple[int, WorkerOrder] | None = None

    def enter(self, generation: int, order: WorkerOrder) -> None:
        """Note that this worker is about to form the group of a generation, under an order."""
        self._entered = (generation, order)

    def leave(self) -> None:
        """Note that this worker depends on no group any more."""
        self._entered = None

    @property
    def entered(self) -> tuple[int, WorkerOrder] | None:
        """Both facts: another object after each change."""
        return self._entered

    @property
    def number(self) -> int | None:
        """The generation; None outside of any."""
        entered = self._entered
        return entered[0] if entered is not None else None

    def is_over(self, generation: int, order: WorkerOrder) -> bool:
        """Whether the job's generation or this worker's order is now another one."""
        return is_other(self._entered, generation, order)


def is_other(entered: tuple[int, WorkerOrder] | None, generation: int, order: WorkerOrder) -> bool:
    """Whether a worker has entered a generation under an order, and not these ones."""
    return entered is not None and entered != (generation, order)
