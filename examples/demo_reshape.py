"""A job that trains is changed, and changed again, and not one bit of the result changes.

1. Four machines train a GPT of ten layers as two pipelines of two stages. swift-recover makes them one of one
   stage and one of three, while they train. A machine gets SIGKILL, and none comes: three machines run four
   stages. swift-recover makes it pipelines of one stage and of two. Then a new machine comes, and
   swift-recover makes it two and two again.
2. The same training runs undisturbed; the final weights of both are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from examples.commands import (  # before torch: it sets how much torch logs
    CommandError,
    check,
    started,
)

# isort: split
from rich.console import Console
from rich.table import Table

from examples.demo import run_demo
from examples.demo_elastic import MACHINES, Machines, free_port, same_weights, undisturbed, watching
from swift_ft.cli.watch import View, Watch
from swift_ft.recovery.job_state import Phase, State
from swift_ft.units import counted, format_bytes, format_seconds

SCRIPT = Path(__file__).with_name("train_elastic.py")
NEVER = 1_000_000
"""Iterations until somebody says how many there are to be: the last change does."""
EVEN = ("--exact", "--pipelines=2")
MICROBATCHES = 8
"""Of each pipeline, in each iteration."""
SMALL = ("--width", "48", "--sequence", "32", "--microbatch-size", "1")
FIRST_AT, AT_LEAST = 8, 20
"""The first change comes at this iteration; so many follow the last one, at least."""
KILLED = 1
UNLIKE = ([[0, 9]], [[0, 2], [3, 6], [7, 9]])
SMALLER = ([[0, 9]], [[0, 4], [5, 9]])
"""Plans: pipelines, each with the first and the last layer of its stages."""
_LOOK_S = 0.02
_WITHIN_S = 240.0
"""For each part of the story."""
REFUSED = 2
"""The exit code of swift-recover while the job is about to change by itself: ask again."""


@dataclass(frozen=True)
class Pause:
    """What happened to the job, and how long nobody trained.

    Attributes:
        what: in words.
        workers: before and after it.
        iteration: that were completed by then.
        pause_s: from the first worker's stop, or from the loss's detection, until all trained again.
        moved: bytes of state that came from other machines.
    """

    what: str
    workers: tuple[int, int]
    iteration: int
    pause_s: float
    moved: int


@dataclass
class Story:
    """The run that is changed, while it is watched."""

    machines: Machines
    watch: Watch
    console: Console
    iterations: list[int] = field(default_factory=list)
    """That each change took, from the request until all trained in the next world."""

    @property
    def state(self) -> State:
        """The job's."""
        return self.watch.view.state

    @property
    def iteration(self) -> int:
        """Iterations that are completed, as far as workers have told."""
        return max((progress.iteration for progress in self.watch.view.progress.values()), default=0)

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Follow the run until something is so.

        Raises:
            CommandError: if the run ends before that, or it takes too long.
        """
        deadline = time.monotonic() + _WITHIN_S
        while not reached():
            self._look()
            if self.watch.over or all(one.poll() is not None for one in self.machines.processes.values()):
                raise CommandError(f"the run has ended before {what}")
            if time.monotonic() > deadline:
                raise CommandError(f"{what} has not come within {_WITHIN_S:g} s")
            time.sleep(_LOOK_S)

    def to_the_end(self) -> None:
        """Follow the run until it has ended.

        Raises:
            CommandError: if it makes no progress.
        """
        last, deadline = self.iteration, time.monotonic() + _WITHIN_S
        while not self.watch.over:
            self._look()
            if self.iteration > last:
                last, deadline = self.iteration, time.monotonic() + _WITHIN_S
            if time.monotonic() > deadline:
                raise CommandError(f"the run has stood at iteration {last} for {_WITHIN_S:g} s")
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        for news in self.watch.poll():
            self.console.print(f"{news.at:8.2f} s  {news.text}", highlight=False)

    def change(self, *words: str) -> None:
        """Give a command to the run, and follow it until the command has ended.

        Raises:
            CommandError: if it fails.
        """
        self.until(self.settled, "a moment in which the job can change")
        address, run_id = self.machines.joined.read_text().split()
        command = [sys.executable, "-m", "swift_ft.cli.recover", words[0]]
        split = words.index("--") if "--" in words else len(words)
        command += [*words[1:split], "--rdzv-endpoint", address, "--rdzv-id", run_id]
        command += words[split:]
        self.console.print(f"$ swift-recover {' '.join(words[:split])}", style="bold", highlight=False)
        output = self.machines.folder / f"change{len(self.iterations)}.txt"
        began, deadline = self.iteration, time.monotonic() + _WITHIN_S
        while True:
            with started(command, output) as process:
                self.until(lambda: process.poll() is not None, f"the end of swift-recover {words[0]}")
            if process.returncode != REFUSED or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        check(process, output)
        self.console.print(output.read_text().rstrip(), style="dim", highlight=False)
        self.iterations.append(self.iteration - began)

    def settled(self) -> bool:
        """Whether all train, and nothing is about to change by itself."""
        return self.state.phase == Phase.LIVE and self.state.layouts.pending is None


def main() -> int:
    """Runs the demo and prints its results. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a model that takes little time")
    model = SMALL if parser.parse_args().small else ()
    return run_demo(partial(run, model=model), Console())


def run(folder: Path, console: Console, model: Sequence[str]) -> int:
    """Both runs of a model, which options name, one after the other. Returns the exit code."""
    console.rule("[bold]1 of 2: two pipelines, unlike ones, fewer machines, and two again", align="left")
    report, iterations = changed(folder / "changed", console, model)
    console.rule("[bold]2 of 2: the same training, undisturbed", align="left")
    with console.status(f"trains {iterations} iterations ..."):
        undisturbed(folder / "undisturbed", script(folder / "undisturbed", iterations, model))
    console.rule("[bold]How long nobody trained", align="left")
    found = pauses(report)
    console.print(picture(found))
    identical = same_weights(folder / "changed", folder / "undisturbed", console)
    # A machine that comes late is one for which another one begins.
    as_told = [pause.workers for pause in found[-4:]] == [(4, 4), (4, 4), (4, 3), (3, 4)]
    if not as_told:
        console.print("the run did not go as it is told", style="red")
    return 0 if identical and as_told else 1


def changed(folder: Path, console: Console, model: Sequence[str]) -> tuple[dict[str, Any], int]:
    """The run that is changed: what its journal tells, and how many iterations it had."""
    folder.mkdir()
    with ExitStack() as stack:
        machines = Machines(folder, stack, f"127.0.0.1:{free_port()}", script(folder, NEVER, model))
        for _ in range(MACHINES):
            machines.start()
        story = Story(machines, watching(machines, View()), console)
        story.until(lambda: story.iteration >= FIRST_AT, f"iteration {FIRST_AT}")
        story.change("reshape", "--plan", plan(folder, "unlike", UNLIKE))
        machines.kill(KILLED)
        story.until(lambda: bool(story.state.membership.hosts), "the loss")
        story.change("reshape", "--plan", plan(folder, "smaller", SMALLER))
        machines.start()
        story.until(lambda: len(story.state.membership.spares) == 1, "another machine")
        # Where the training is to end depends on how long changes take here.
        iterations = story.iteration + 3 * max(story.iterations) + AT_LEAST
        story.change("reshape", "--plan", "dp=2,pp=2", "--", *script(folder, iterations, model))
        story.to_the_end()
        machines.end()
    return json.loads(machines.events.read_text()), iterations


def plan(folder: Path, name: str, pipelines: Sequence[Sequence[Sequence[int]]]) -> str:
    """Writes a plan, in which pipelines share the batch as evenly as can be."""
    path = folder / f"{name}.json"
    each = [{"stages": stages, "microbatches": MICROBATCHES} for stages in pipelines]
    path.write_text(json.dumps({"pipelines": each, "workers_per_machine": 1}))
    return str(path)


def script(folder: Path, iterations: int, model: Sequence[str]) -> list[str]:
    """What is trained, and where its results go."""
    options = [f"--iterations={iterations}", "--checkpoint-every=10", "--dropout=0.1", *EVEN, *model]
    return [str(SCRIPT), *options, "--store", str(folder / "store"), "--weights-out", str(folder / "weights")]


def pauses(report: dict[str, Any]) -> list[Pause]:
    """All changes and losses of a run with a worker on each machine, in order.

    Args:
        report: as ``swift-run --events-out`` writes it.
    """
    worlds = [world for world in report["worlds"] if world["live"] is not None]
    # A guest that is not needed any more ends at a switch: nothing is lost with it.
    switches = {world["live"] for world in worlds}
    losses = [loss for loss in report["recoveries"] if loss["live"] not in switches]
    found, size = list[Pause](), MACHINES
    for one in sorted([*worlds, *losses], key=lambda one: float(one["live"])):
        if "world" in one:
            workers, moved = (size, len(one["machines"])), sum(one["peers"].values())
            what, size = f"change to {counted(workers[1], 'machine')}", workers[1]
            found.append(Pause(what, workers, one["iteration"], one["live"] - one["stopped"], moved))
        else:
            what = f"a loss: {counted(size - len(one['machines']), 'machine')} for {size} workers"
            found.append(Pause(what, (size, size), one["resume"], one["live"] - one["detected"], 0))
    return found


def picture(found: list[Pause]) -> Table:
    """A row for each."""
    table = Table()
    for column in ("", "workers", "from iteration", "nobody trained for", "from other machines' memory"):
        table.add_column(column)
    for pause in found:
        workers = " -> ".join(map(str, dict.fromkeys(pause.workers)))
        moved = format_bytes(pause.moved) if pause.moved else "-"
        table.add_row(pause.what, workers, str(pause.iteration), format_seconds(pause.pause_s), moved)
    return table


if __name__ == "__main__":
    sys.exit(main())
