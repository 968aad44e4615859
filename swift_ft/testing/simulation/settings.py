"""The settings of a simulated job that its seed decides before the job begins."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(slots=True)
class Settings:
    """The settings of one run.

    Attributes:
        iterations: to train.
        checkpoint_every: iterations from one regular checkpoint to the next.
        keep: committed checkpoints that are kept.
        background_rate: how often a worker's background threads act instead of its training thread.
        request_rate: how often a worker requests an early checkpoint, per iteration.
        news_rate: how often a participant reads the journal before it acts.
        resume: the checkpoints of an earlier run that this job resumes from, if any, oldest first.
        logs_survive: logs survive their machine.
        on_device: memory is too scarce to retain the messages that stay inside a machine.
        sessionless: the script has no session.
    """

    iterations: int
    checkpoint_every: int
    keep: int
    background_rate: float
    request_rate: float
    news_rate: float
    resume: tuple[int, ...]
    logs_survive: bool
    on_device: bool
    sessionless: bool

    @classmethod
    def draw(cls, seed: int, rng: random.Random, *, sessionless: bool) -> Settings:
        """Draw the settings of a seed."""
        settings = cls(
            iterations=rng.randint(3, 9),
            checkpoint_every=rng.choice((1, 1, 2, 3, 4, 9)),
            keep=rng.randint(1, 2),
            background_rate=rng.choice((0.4, 0.4, 0.04)),
            request_rate=rng.choice((0.0, 0.0, 0.1, 0.5)),
            news_rate=rng.choice((1.0, 1.0, 0.1)),
            resume=(),
            logs_survive=seed % 5 == 1,
            on_device=seed % 5 == 2,
            sessionless=sessionless,
        )
        if rng.random() < 0.2 and not sessionless:
            every = settings.checkpoint_every
            settings.resume = (every, 2 * every)[: rng.randint(1, 2)]
            settings.iterations = max(settings.iterations, settings.resume[-1] + 2)
        return settings
