"""The cost of all digests, and of copying buffers, while nothing fails: CPU time of one worker.

Transformers with AdamW, and a stack of BatchNorm layers; in turns:
  iteration   forward, backward, optimizer
  batch       the digest of an iteration's inputs and targets
  state       the digests of parameters and optimizer state at a checkpoint boundary (``verify="digest"``)
  files       the digests of the checkpoint's files
  buffers     the copies that a step begins with

A ratio is that of neighbours: what an iteration costs with its share of a boundary, against without. CPU time
of the thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    of_repetitions,
    table,
    target_table,
)
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.runtime.data.digest import BatchDigest
from swift_ft.storage.digest import Digester
from swift_ft.torch_core.buffers import BufferCopies
from swift_ft.torch_core.tensors import tensor_bytes

LIMIT = 1.01
EVERY = (100, 10)
"""Iterations between two boundaries: the default of a session, and one that is rarely used."""


@dataclass(frozen=True)
class Case:
    """A model, and the tokens (or rows) that each iteration trains on."""

    name: str
    width: int
    batch: int


CASES = (
    Case("transformer, 4 layers 128 wide", 128, 8),
    Case("transformer, 4 layers 512 wide", 512, 8),
    Case("BatchNorm", 512, 64),
)


@dataclass(frozen=True)
class Sample:
    """CPU seconds of neighbours."""

    iteration: float
    batch: float
    state: float
    files: float
    buffers: float

    def with_digests(self, every: int) -> float:
        """What an iteration costs with all digests and its share of a boundary's, against without."""
        return 1 + (self.batch + (self.state + self.files) / every) / self.iteration

    @property
    def with_buffers(self) -> float:
        """What an iteration costs with copies of buffers, against without."""
        return 1 + self.buffers / self.iteration


def main() -> int:
    """Measures all cases and prints the report."""
    parser = argument_parser(__doc__, repetitions=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = {case: measure(case, args.repetitions) for case in CASES}
    targets = judge(samples)
    body = report(samples, targets, args.repetitions)
    return finish("proof", body, {"samples": {case.name: runs for case, runs in samples.items()}}, args)


def measure(case: Case, repetitions: int) -> list[Sample]:
    """Trains and digests in turns; the first turn is not counted."""
    step, state, batch = training(case)
    copies: BufferCopies | None = None
    found = []
    for repetition in range(repetitions + 1):
        iteration = cpu_of(step)
        of_batch = cpu_of(lambda: BatchDigest(batch).value)
        of_state = cpu_of(lambda: tensor_digests(state.named_tensors()))
        of_files = cpu_of(lambda: digest_files(state))
        before = time.thread_time()
        copies = BufferCopies(state.modules.values(), copies)
        found.append(Sample(iteration, of_batch, of_state, of_files, time.thread_time() - before))
        print(f"# {case.name}, {repetition}: {found[-1]}", file=sys.stderr, flush=True)
    return found[1:]


def digest_files(state: TrainingState) -> None:
    """Hash all bytes of the state as they are hashed on their way into files."""
    digester = Digester()
    for tensor in state.named_tensors().values():
        digester.update(tensor_bytes(tensor))
    digester.digest()


def training(case: Case) -> tuple[Callable[[], None], TrainingState, object]:
    """One iteration, the state that it changes, and the batch that it is given."""
    width = case.width
    if case.name == "BatchNorm":
        blocks = ((nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(50))
        model: nn.Module = nn.Sequential(*(layer for block in blocks for layer in block))
        inputs = torch.randn(case.batch, width)
    else:
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 4)
        inputs = torch.randn(case.batch, 128, width)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    targets = torch.randint(0, 50_000, inputs.shape[:-1])
    return step, TrainingState({"model": model, "optimizer": optimizer}), (inputs, targets)


def cpu_of(action: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    before = time.thread_time()
    action()
    return time.thread_time() - before


def judge(samples: dict[Case, list[Sample]]) -> list[Target]:
    """What was asked for, against the medians."""
    found = []
    for case, runs in samples.items():
        for words, ratio in (
            (
                f"all digests, a checkpoint every {EVERY[0]} iterations",
                Summary.of([run.with_digests(EVERY[0]) for run in runs]),
            ),
            ("copies of buffers", Summary.of([run.with_buffers for run in runs])),
        ):
            met = ratio.median <= LIMIT
            found.append(Target(f"{case.name}: {words}", f"<= {LIMIT}", ratio.text("", digits=4), met))
    return found


def report(samples: dict[Case, list[Sample]], targets: list[Target], repetitions: int) -> str:
    """All results as Markdown."""
    rows = [
        [
            case.name,
            *(
                Summary.of([getattr(run, of) for run in runs]).text(digits=4)
                for of in ("iteration", "batch", "state", "files")
            ),
            *(Summary.of([run.with_digests(every) for run in runs]).text("", digits=4) for every in EVERY),
            Summary.of([run.buffers for run in runs]).text(digits=5),
            Summary.of([run.with_buffers for run in runs]).text("", digits=4),
        ]
        for case, runs in samples.items()
    ]
    head = [
        "",
        "iteration",
        "batch",
        "state",
        "files",
        *(f"ratio, every {every}" for every in EVERY),
        "buffers",
        "ratio, each",
    ]
    intro = (
        "The cost of all digests (of each batch; of state and files at a checkpoint), and of the copies of "
        "buffers when a step begins, on one worker with one thread. AdamW; transformers with 8 sequences of "
        "128, and 50 linear layers with BatchNorm, 64 rows. CPU time of the thread; "
        f"{of_repetitions(repetitions)}."
    )
    return f"{intro}\n\n{table(head, rows)}\n\n{target_table(targets)}"


if __name__ == "__main__":
    sys.exit(main())
