"""Machines die and none comes; others come later. Training goes on, and not one bit of the result changes.

1. Four machines train a GPT of ten layers. Two of them get SIGKILL, one after the other. The others rebuild
   what was lost, and share the layers among them. Then two new ones come, and get their part.
2. The same training runs undisturbed; the final weights of both are compared bit for bit.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from examples.commands import (  # before torch: it sets how much torch logs
    CommandError,
    check,
    finished,
    started,
    swift_run,
)

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from examples.demo import run_demo, same_bits
from swift_ft.cli.watch import View, Watch, layers_on
from swift_ft.config.store_address import StoreAddress
from swift_ft.recovery.job_state import Phase
from swift_ft.units import in_spans, spans_of

SCRIPT = Path(__file__).with_name("train_elastic.py")
MACHINES, ITERATIONS = 4, 120
KILLS = {15: 1, 35: 2}
"""By iteration, the slot whose first machine dies."""
NEW_MACHINES_AT = 55
_LOOK_S = 0.02
_STARTS_S, _ENDS_S = 180.0, 60.0


@dataclass
class Layout:
    """Which machine has which layers, from an iteration on."""

    iteration: int
    layers: dict[str, list[int]]


@dataclass
class Machines:
    """The launchers of a run, as if each were a host of its own."""

    folder: Path
    stack: ExitStack
    endpoint: str
    script: list[str]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    @property
    def joined(self) -> Path:
        """Where the machines write the endpoint and the name of the run that they joined."""
        return self.folder / "joined.txt"

    @property
    def events(self) -> Path:
        """Where the first machine writes what the journal tells, when the run has ended."""
        return self.folder / "events.json"

    def start(self) -> None:
        """One more machine."""
        number = next(self.numbers)
        command = [sys.executable, "-m", "swift_ft.cli.run", "--nnodes", f"1:{MACHINES}"]
        command += ["--rdzv-endpoint", self.endpoint, "--rdzv-id", "elastic", "--elastic-wait", "2"]
        command += ["--node-rank", str(number % MACHINES), "--log-dir", str(self.folder / "logs")]
        command += ["--endpoint-out", str(self.joined)]
        command += ["--events-out", str(self.events)] * (number == 0)
        command += self.script
        output = self.folder / f"machine{number}.txt"
        # Machines of their own would have their own cores; these share the host's.
        self.processes[number] = self.stack.enter_context(started(command, output, OMP_NUM_THREADS="1"))

    def kill(self, number: int) -> None:
        """A machine loses its power."""
        self.processes.pop(number).kill()

    def end(self) -> None:
        """Wait until all have ended.

        Raises:
            CommandError: if one has not ended well.
        """
        for number, process in self.processes.items():
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired as error:
                raise CommandError(f"machine {number} has not ended within {_ENDS_S:g} s") from error
            check(process, self.folder / f"machine{number}.txt")


def main() -> int:
    """Runs the demo and prints its results. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    return run_demo(run, Console())


def run(folder: Path, console: Console) -> int:
    """Both runs, one after the other. Returns the exit code."""
    console.rule("[bold]1 of 2: four machines; two die, and two others come", align="left")
    layouts = disturbed(folder / "disturbed", console)
    console.rule("[bold]2 of 2: the same training, undisturbed", align="left")
    with console.status("trains ..."):
        undisturbed(folder / "undisturbed", script(folder / "undisturbed"))
    console.rule("[bold]Which machine had which layers, from one iteration to the next", align="left")
    if not layouts:
        console.print("the run was over before anything was seen of it", style="red")
        return 1
    console.print(picture(layouts))
    identical = same_weights(folder / "disturbed", folder / "undisturbed", console)
    machines = [len(layout.layers) for layout in layouts]
    as_told = min(machines) == MACHINES - len(KILLS) and machines[-1] == MACHINES
    if not as_told:
        console.print(f"the run was over too soon: its numbers of machines were {machines}", style="red")
    return 0 if identical and as_told else 1


def disturbed(folder: Path, console: Console) -> list[Layout]:
    """Machines die, and others come. Returns which ran what, each time that this changed."""
    folder.mkdir()
    layouts: list[Layout] = []
    with ExitStack() as stack:
        machines = Machines(folder, stack, f"127.0.0.1:{free_port()}", script(folder))
        for _ in range(MACHINES):
            machines.start()
        watch = watching(machines, View(ITERATIONS))
        kills, new = dict(KILLS), MACHINES - len(KILLS)
        while not watch.lost and watch.view.state.verdict is None:
            for news in watch.poll():
                console.print(f"{news.at:8.2f} s  {news.text}", highlight=False)
            iteration = max((progress.iteration for progress in watch.view.progress.values()), default=0)
            _note(layouts, watch.view, iteration)
            live = watch.view.state.phase == Phase.LIVE
            if live and kills and iteration >= min(kills):
                machines.kill(kills.pop(min(kills)))
            elif live and not kills and new and iteration >= NEW_MACHINES_AT:
                new -= 1
                machines.start()
            time.sleep(_LOOK_S)
        machines.end()
    return layouts


def undisturbed(folder: Path, training: Sequence[str]) -> None:
    """Four machines train, to the end."""
    folder.mkdir()
    flags = ["--machines", str(MACHINES), "--log-dir", str(folder / "logs")]
    finished(swift_run(*flags, *training), folder / "output.txt")


def same_weights(one: Path, other: Path, console: Console) -> bool:
    """Whether the runs in two folders ended with the same weights, bit for bit. Says so."""
    ours, theirs = weights(one), weights(other)
    same = bool(ours) and ours.keys() == theirs.keys() and all(same_bits(ours[n], theirs[n]) for n in ours)
    verdict = "yes" if same else "no"
    console.print(f"\nweights identical: {verdict} ({len(ours)} tensors, bit for bit)", highlight=False)
    return same


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of all layers, by name, whichever machine had them at the end."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "weights").glob("rank*.pt")):
        found |= torch.load(path, weights_only=True)
    return found


def script(folder: Path) -> list[str]:
    """What is trained, and where its results go."""
    options = ["--iterations", str(ITERATIONS), "--checkpoint-every", "10", "--dropout", "0.1"]
    return [str(SCRIPT), *options, "--store", str(folder / "store"), "--weights-out", str(folder / "weights")]


def picture(layouts: list[Layout]) -> Table:
    """A row for each machine, a column for each layout; a cell has the layers."""
    table = Table()
    table.add_column("machine")
    ends = [layout.iteration for layout in layouts[1:]] + [ITERATIONS]
    for layout, end in zip(layouts, ends, strict=True):
        table.add_column(f"{layout.iteration} to {end}")
    names = sorted({name for layout in layouts for name in layout.layers}, key=lambda name: (len(name), name))
    for name in names:
        cells = [in_spans(spans_of(layout.layers.get(name, [])), "-") or "-" for layout in layouts]
        table.add_row(name, *cells)
    return table


def _note(layouts: list[Layout], view: View, iteration: int) -> None:
    """Add the layout if it is another one than before."""
    state = view.state
    if state.phase != Phase.LIVE:
        return
    layers: dict[str, list[int]] = {}
    for slot, machine in sorted(state.membership.members.items()):
        layers.setdefault(state.membership.hosts.get(machine, machine), []).extend(layers_on(state, slot))
    arrived = {machine: place for place, machine in enumerate(_in_order(layouts, layers))}
    named = {f"{chr(ord('A') + arrived[machine])} {machine}": sorted(own) for machine, own in layers.items()}
    if not layouts or layouts[-1].layers != named:
        layouts.append(Layout(iteration, named))


def _in_order(layouts: list[Layout], layers: dict[str, list[int]]) -> list[str]:
    """All machines so far, in the order in which they were first seen."""
    known = [name.partition(" ")[2] for layout in layouts for name in layout.layers]
    return list(dict.fromkeys([*known, *layers]))


def watching(machines: Machines, view: View) -> Watch:
    """The run that the machines have joined, once one has.

    Raises:
        CommandError: if none does.
    """
    deadline = time.monotonic() + _STARTS_S
    while not machines.joined.exists() or not machines.joined.read_text().endswith("\n"):
        if ended := [number for number, process in machines.processes.items() if process.poll() is not None]:
            output = (machines.folder / f"machine{ended[0]}.txt").read_text()
            raise CommandError(f"machine {ended[0]} has ended before it had joined a run:\n{output[-2000:]}")
        if time.monotonic() > deadline:
            raise CommandError(f"no machine has joined a run within {_STARTS_S:g} s")
        time.sleep(_LOOK_S)
    address, run_id = machines.joined.read_text().split()
    return Watch(StoreAddress.parse(address), run_id, view)


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
