"""``swift-run --check``: two iterations, a table, an exit code, and nothing that stays."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import DEADLINE_S, EXAMPLES, SMALL, processes_of
from tests.support.prefork import launch
from tests.support.tutorial import blocks_of

SCRIPT = Path(__file__).parent / "scripts" / "checked.py"
LOOPS = Path(__file__).parent / "habits" / "scripts" / "loops.py"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "check.md"


@dataclass(frozen=True)
class Check:
    """The results of a check: its exit code, what it printed, and the files that it has left."""

    code: int
    output: str
    left: list[str]

    @property
    def text(self) -> str:
        """The output, in one line with single spaces."""
        return " ".join(self.output.split())


def check(folder: Path, *command: str) -> Check:
    """Checks a script in a folder of its own, which also has the temporary files."""
    temporary = Path(tempfile.mkdtemp(prefix="swift-"))  # a short path: loaders have sockets there
    environment = {"OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(folder), "TMPDIR": str(temporary)}
    with contextlib.chdir(folder), launch(["--check", *command], {**os.environ, **environment}) as process:
        end = process.wait(DEADLINE_S)
    assert end.code is not None, end.output[-6000:]
    assert not [*end.left, *processes_of(folder)], end.output[-3000:]
    left = [path.name for path in [*temporary.iterdir(), *folder.iterdir()]]
    # Multiprocessing and torch's compiler leave their own.
    left = [name for name in left if not name.startswith(("pymp-", "torchinductor_"))]
    shutil.rmtree(temporary)
    return Check(end.code, end.output, left)


def test_replicas(tmp_path: Path) -> None:
    found = check(tmp_path, str(EXAMPLES / "train_ddp.py"), *SMALL, "--store", "runs/ddp")
    assert found.code == 0, found.output
    assert not found.left
    assert re.search(r"model +weights +DistributedDataParallel +\d+ kB +all +from a replica", found.output)
    assert re.search(r"optimizer +optimizer +AdamW .* a step can be undone", found.output)
    assert re.search(r"scheduler +scheduler +LinearLR .* put back when a step is repeated", found.output)
    assert "replicas 2 of the model all workers" in found.text
    assert "1 replication the iteration in flight the model: a replica is on machine 0" in found.text
    assert "stood in for the store runs/ddp in 2 iterations" in found.text
    assert found.output.splitlines()[-1] == "All is protected."
    # The loop has ended in the middle, and nothing that follows it was run.
    assert "iteration 1: loss" in found.output
    assert "iteration 2: loss" not in found.output


def test_a_pipeline(tmp_path: Path) -> None:
    example = [str(EXAMPLES / "train_swift.py"), *SMALL, "--checkpoint-every", "7", "--store", "runs/pipe"]
    found = check(tmp_path, "--machines", "4", *example)
    assert found.code == 0, found.output
    assert not found.left
    assert "pipeline 1f1b, stage 2 of 4, 8 microbatches worker 2" in found.text
    assert "3 logging the iteration in flight; the lost part replays 7 iterations (" in found.text
    assert re.search(r"model +weights +ModuleList +\d+ kB +3 +replayed from the log", found.output)


@pytest.mark.parametrize("loop", ["steps", pytest.param("short", marks=pytest.mark.thorough)])
def test_memory_checkpoints(loop: str, tmp_path: Path) -> None:
    """The loop may have fewer iterations than a check, too. Nothing after it is run."""
    found = check(tmp_path, str(SCRIPT), "memory", loop)
    assert found.code == 0, found.output
    assert not found.left
    assert "memory checkpoints every 5 iterations" in found.text
    assert "1 memory 5 iterations of all machines (" in found.text
    assert ("in 1 iteration," if loop == "short" else "in 2 iterations,") in found.text
    assert "after the loop" not in found.output


def test_epochs(tmp_path: Path) -> None:
    """Of one step each: a check ends between the lines after an epoch and those before the next one."""
    found = check(tmp_path, str(SCRIPT), "replicas", "epochs")
    assert found.code == 0, found.output
    assert not found.left
    assert "in 2 iterations," in found.text
    assert "epoch 1" in found.output
    assert "epoch 2" not in found.output
    assert "after the loop" not in found.output


def test_no_session(tmp_path: Path) -> None:
    """The script would train for ever."""
    found = check(tmp_path, str(SCRIPT), "no session")
    assert found.code == 1, found.output
    assert not found.left
    assert "Nothing is protected: the script makes no swift_ft.Session" in found.text
    assert "as under torchrun" in found.text
    assert "Traceback" not in found.output


@pytest.mark.thorough
def test_no_training(tmp_path: Path) -> None:
    """It ends by itself, and well."""
    found = check(tmp_path, "--machines", "1", str(SCRIPT), "no training")
    assert found.code == 1, found.output
    assert "Nothing is protected" in found.text


@pytest.mark.parametrize(
    ("habit", "line"),
    [
        ("replicas iterator", "the batches come from an iterator (batches)"),
        pytest.param(
            "memory iterator", "The position in the data of workers 0 and 1", marks=pytest.mark.thorough
        ),
        pytest.param(
            "array", "bank.array changes in place in a step, and is too large", marks=pytest.mark.thorough
        ),
    ],
)
def test_something_unprotected(habit: str, line: str, tmp_path: Path) -> None:
    found = check(tmp_path, str(SCRIPT), *habit.split())
    assert found.code == 1, found.output
    assert line in found.text
    assert "batches[step.index]" in found.text or "TO CHANGE:" in found.output
    assert found.output.splitlines()[-1] == "Not protected: 1 thing."


@pytest.mark.thorough
def test_one_machine(tmp_path: Path) -> None:
    found = check(tmp_path, "--machines", "1", str(SCRIPT), "replicas")
    assert found.code == 1, found.output
    assert "0 checkpoint 9 iterations of all machines" in found.text
    assert "Check with more machines: --machines 2." in found.text


REFUSED = {
    "no steps": "(train_step) trains outside of session.steps()",
    "a store for each rank": "The workers name 2 stores",
}


@pytest.mark.parametrize("habit", REFUSED)
def test_what_every_run_refuses(habit: str, tmp_path: Path) -> None:
    found = check(tmp_path, str(LOOPS), "store", habit)
    assert found.code == 2, found.output
    assert not found.left
    (line,) = [line for line in found.output.splitlines() if line.startswith("swift-run: ")]
    assert REFUSED[habit] in line
    assert "What is protected" not in found.output


@pytest.mark.thorough
def test_a_script_that_fails(tmp_path: Path) -> None:
    found = check(tmp_path, str(SCRIPT), "fails")
    assert found.code == 1, found.output
    assert not found.left
    assert "ZeroDivisionError: on purpose" in found.output
    assert "What is protected" not in found.output


def test_the_page(tmp_path: Path) -> None:
    """Its command prints what stands below it, but for figures."""
    command, printed = [block for block in blocks_of(PAGE) if block.language in ("bash", "text")][:2]
    (line,) = command.text.splitlines()
    words = line.replace("examples/", f"{EXAMPLES}/").split()
    assert words[:2] == ["swift-run", "--check"]
    found = check(tmp_path, *words[2:])
    assert found.code == 0, found.output
    shown = " ".join(found.output.partition("What is protected")[2].split())
    expected = " ".join(printed.text.partition("What is protected")[2].split())
    figures = re.compile(r"\d+(\.\d+)? (kB|MB|s)\b")
    assert figures.sub("N", shown) == figures.sub("N", expected)
