"""Measures what it costs to note all that a step may change, in a step of some 20 million parameters.

    python -m benchmarks.recovery.step

One process, one thread, no group: a GPT's step with a wrapped optimizer. The CPU time of what the session
does at the beginning and at the end of a step is held against that of the step around it. In most steps a
sample of each parameter is read; in the first three, the 16th, the 32nd and so on, all bits of all.
"""

from __future__ import annotations

import sys
import time

import torch
from gpt import Config, build_stage, loss_fn
from torch import nn

from benchmarks.lib.results import Summary, Target, argument_parser, finish, table, target_table
from swift_ft.checkpoint.step.rollback import CheckStep, Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.optim import wrap_optimizer

MOST = 0.003
STEPS, WARM_UP = 20, 20
SIZES = Config(layers=10, width=408, heads=6, sequence=128, microbatch_size=2)


class Training:
    """A model, its optimizer, and what notes their steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = build_stage(0, 1, SIZES)
        self.optimizer = wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        state = TrainingState({"model": self.model, "optimizer": self.optimizer})
        self.rollback = Rollback(state, CheckStep.FIRST)
        self.rollback.watch()
        self.iteration = 0

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> tuple[float, float]:
        """CPU seconds of a step, and of what was noted in it."""
        began = time.thread_time()
        self.rollback.begin(self.iteration)
        noted = time.thread_time() - began
        words = torch.randint(64, (SIZES.microbatch_size, SIZES.sequence + 1))
        loss_fn(self.model(words[:, :-1]), words[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended = time.thread_time()
        self.rollback.completed()
        self.iteration += 1
        return ended - began - noted, noted + time.thread_time() - ended


def main() -> int:
    """Measure, print, and keep."""
    args = argument_parser(__doc__, repetitions=3).parse_args()
    torch.set_num_threads(1)
    training = Training()
    for _ in range(WARM_UP):
        training.step()
    shares, step_s, noted_s = [], [], []
    for number in range(args.repetitions):
        steps = [training.step() for _ in range(STEPS)]
        of_steps, of_notes = (Summary.of(seconds).median for seconds in zip(*steps, strict=True))
        step_s.append(of_steps)
        noted_s.append(of_notes)
        shares.append(of_notes / of_steps)
        print(f"# {number + 1}: {of_notes * 1e3:.3f} ms of {of_steps * 1e3:.1f} ms", file=sys.stderr)
    share = Summary.of(shares)
    target = Target(
        "CPU time of the notes / of the step", f"<= {MOST}", share.text("", 4), share.median <= MOST
    )
    rows = [
        ["a step without them", Summary.of([s * 1e3 for s in step_s]).text(" ms", 1)],
        ["all that is noted", Summary.of([s * 1e3 for s in noted_s]).text(" ms")],
    ]
    millions = f"{training.parameters / 1e6:.1f} million parameters"
    body = (
        f"{millions}, one thread. Medians of {STEPS} steps, {args.repetitions} repetitions; steps in which "
        f"all bits are compared are no medians.\n\n{table(['CPU time of', ''], rows)}\n\n"
        + target_table([target])
    )
    samples = {"share": shares, "step_s": step_s, "noted_s": noted_s}
    return finish("step-notes", body, samples, args)


if __name__ == "__main__":
    sys.exit(main())
