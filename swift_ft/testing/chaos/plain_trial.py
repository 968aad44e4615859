"""The script under plain torchrun, without swift_ft's work, compared with the undisturbed run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.comparison import files_of
from swift_ft.testing.chaos.launchers import LAUNCHERS
from swift_ft.testing.chaos.leftovers import end_processes
from swift_ft.testing.chaos.run_folder import FOLDER, new_own, output_of, search_path, working_directory
from swift_ft.testing.chaos.trial import Training
from swift_ft.testing.chaos.unstable import FILE, State, Unstable

_PLAIN = str(Path(__file__).with_name("plain.py"))


@dataclass(frozen=True, slots=True)
class Likeness:
    """The values and files of a script under torchrun, compared with those under swift-run.

    Attributes:
        compared: how many values both have, and how many files one of them has.
        differ: the names of those that are not equal to the bit, or that only one of them has.
    """

    compared: int
    differ: tuple[str, ...]


def plain_state(training: Training, folder: Path, workers: int, iteration: int) -> dict[str, str]:
    """Run the script once with torchrun. Digests of the values of its state, and of its files.

    Args:
        training: what.
        folder: an empty folder.
        workers: their number.
        iteration: that of the checkpoint with which the values are compared.

    Raises:
        SwiftError: it fails there.
        StoppedError: a signal has stopped all.
    """
    states = new_own(folder) / "states"
    states.mkdir()
    script = [argument.replace(FOLDER, str(folder)) for argument in training.script]
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    code = LAUNCHERS.run(
        [*launcher, _PLAIN, str(states), str(iteration), *script],
        folder,
        training.deadline_s,
        output=output_of(folder),
        cwd=working_directory(training.script, folder),
        environment=search_path(training.script),
    ).code
    if code is None:
        end_processes(folder)  # the launcher was ended, and its workers may not be
        raise SwiftError(f"Plain torchrun did not end within {training.deadline_s:g} s.")
    if code:
        raise SwiftError(
            f"Plain torchrun ended with exit code {code}: the script needs what only a session has, or fails "
            f"by itself. See {output_of(folder)}, or omit --torchrun."
        )
    found = files_of(folder)
    for path in sorted(states.iterdir()):
        found |= json.loads(path.read_text())
    return found


def likeness(plain: State, undisturbed: State, unstable: Unstable) -> Likeness:
    """Compare the values of the state that both runs have, and all files: one that is missing differs.

    Args:
        plain: digests of a run under torchrun.
        undisturbed: those of one under swift-run.
        unstable: what differs between runs under swift-run, too, is not compared.

    Raises:
        SwiftError: there is nothing to compare.
    """
    both = plain.keys() & undisturbed.keys()  # a variable of the script has no digest under torchrun
    here, there = (
        {name: digest for name, digest in state.items() if name in both or _is_compared_file(name)}
        for state in (plain, undisturbed)
    )
    compared = unstable.compared(here, there)
    differ = [name for name in unstable.differing(here, there) if name in both or _is_compared_file(name)]
    if not compared and not differ:
        raise SwiftError("Plain torchrun left nothing that the run under swift-run has: omit --torchrun.")
    return Likeness(len(compared), tuple(differ))


def _is_compared_file(name: str) -> bool:
    """Whether it is a file. An empty folder may be one for the store, which torchrun leaves so."""
    return name.startswith(FILE) and not name.endswith("/")
