"""The script under plain torchrun, without swift_ft's work, compared with the undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.comparison import files_of
from swift_ft.testing.chaos.leftovers import MARK, end_processes
from swift_ft.testing.chaos.run_folder import FOLDER, is_at_home, new_own, output_of
from swift_ft.testing.chaos.trial import Training, Trial

_PLAIN = str(Path(__file__).with_name("plain.py"))


@dataclass(frozen=True, slots=True)
class Likeness:
    """The values and files of a script under torchrun, compared with those under swift-run.

    Attributes:
        compared: how many values and files both have.
        differ: the names of those that are not equal to the bit.
    """

    compared: int
    differ: tuple[str, ...]


def compared_with_torchrun(training: Training, folder: Path, workers: int, undisturbed: Trial) -> Likeness:
    """Run the script once with torchrun, and compare what both runs have: values of its state, and files.

    Args:
        training: what.
        folder: an empty folder.
        workers: their number.
        undisturbed: the run under swift-run.

    Raises:
        SwiftError: it fails there, or there is nothing to compare.
    """
    states = new_own(folder) / "states"
    states.mkdir()
    script = [argument.replace(FOLDER, str(folder)) for argument in training.script]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    try:
        done = subprocess.run(
            [*launcher, _PLAIN, str(states), *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=training.deadline_s,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: str(folder)},
            cwd=None if is_at_home(training.script) else folder,
        )
    except subprocess.TimeoutExpired as error:
        end_processes(folder)  # the launcher was killed, and its workers were not
        raise SwiftError(f"Plain torchrun did not end within {training.deadline_s:g} s.") from error
    output_of(folder).write_text(done.stdout)
    if done.returncode:
        raise SwiftError(
            f"Plain torchrun ended with exit code {done.returncode}: the script needs what only a session "
            f"has, or fails by itself. See {output_of(folder)}, or omit --torchrun."
        )
    found = files_of(folder)
    for path in sorted(states.iterdir()):
        found |= json.loads(path.read_text())
    names = sorted((found.keys() & undisturbed.state.keys()) - training.unstable)
    if not names:
        raise SwiftError("Plain torchrun left nothing that the run under swift-run has: omit --torchrun.")
    return Likeness(len(names), tuple(n for n in names if found[n] != undisturbed.state[n]))
