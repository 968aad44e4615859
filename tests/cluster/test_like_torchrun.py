"""The same script has the same result under plain torchrun, to the bit, where nothing is lost.

Both draw the same random numbers. In pipelines there is no dropout, since a session derives numbers for each
microbatch, and no BatchNorm: torch's first exchange of shapes counts uninitialised memory in its statistics,
which a session puts back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import EXAMPLES, ClusterRun, run_cluster
from tests.support.integrations import assert_same_files
from tests.support.plain_run import Job, run_plain
from tests.support.support_table import CASES, PARALLELISMS

HERE = Path(__file__).parent
HABITS = HERE / "habits" / "scripts"
TITAN = HERE / "scripts" / "titan_dies.py"


@dataclass(frozen=True)
class Script:
    """A script of other tests.

    Attributes:
        name: for the failure's text.
        command: the script and its arguments, given a folder of the run's own.
        machines: that train.
        workers: of each machine.
    """

    name: str
    command: Callable[[Path], Sequence[str]]
    machines: int = 2
    workers: int = 1


def place(parallelism: str, feature: str) -> Script:
    """Of the table of docs/support.md."""
    spread = PARALLELISMS[parallelism]
    dropout = "0" if "pipeline" in parallelism else "0.2"

    def command(folder: Path) -> list[str]:
        script = str(HERE / "scripts" / "supports.py")
        return [script, parallelism, feature, str(folder / "store"), dropout]

    return Script(f"{feature}, {parallelism}", command, spread.machines, spread.workers)


def habit(script: str, *arguments: str, machines: int = 2, workers: int = 1) -> Script:
    def command(folder: Path) -> list[str]:
        return [str(HABITS / f"{script}.py"), str(folder / "store"), *arguments]

    return Script(f"{script} {arguments}", command, machines, workers)


def trainer(*sizes: str, workers: int = 1) -> Script:
    def command(folder: Path) -> list[str]:
        steps = ["--training.steps=9", "--validation.interval=3"]
        own = ["--checkpoint.interval=4", f"--checkpoint.folder={folder / 'own'}"]
        return [str(TITAN), *steps, *own, *(f"--parallelism.{size}" for size in sizes)]

    return Script(f"the trainer {sizes}", command, 4 // workers, workers)


TABLE = [place(case.parallelism, case.feature) for case in CASES if not case.impossible and not case.refused]
SCRIPTS = {
    "habits": [
        habit("rates", "exponential"),
        habit("rates", "average"),
        habit("parameters", "momentum encoder, by data"),
        habit("parameters", "SAM"),
        habit("parameters", "clamp, on data"),
        habit("parameters", "weight noise"),
        habit("gradients", "first line"),
        habit("gradients", "by hand"),
        habit("freezes", "sparse"),
        habit("freezes", "gan"),
        habit("saved_values", "extra-grows", "ddp"),
        habit("saved_values", "values", "pipeline"),
        habit("catches", "fsdp", "the body"),
        habit("hidden_state", "counter"),
        habit("attributes", "centre, in place"),
        habit("attributes", "counter", "shards"),
        habit("parameters", "clamp, on data", "shards"),
        habit("flags", "evaluation mode of a layer"),
        habit("own_variables", "seeded in each step"),
        habit("epochs", "nested"),
        habit("epochs", "function"),
    ],
    "habits of replicas of shards": [
        habit("skips_updates", "some iterations", "none", workers=2),
        habit("skips_updates", "two optimizers", "none", workers=2),
    ],
    "the trainer": [
        trainer("dp_replicate=2"),
        trainer(),
        trainer("pp=2", "tp=2", workers=2),
        trainer("pp=2", "dp_shard=2"),
    ],
    **{
        f"support, {parallelism}": [script for script in TABLE if script.name.endswith(f", {parallelism}")]
        for parallelism in PARALLELISMS
    },
}
QUICK = [
    habit("rates", "exponential"),
    habit("parameters", "SAM"),
    habit("freezes", "sparse"),
    habit("hidden_state", "counter"),
    place("DDP", "checkpointing+autocast+EMA+foreach"),
    place("FSDP2, memory checkpoints", "autocast"),
]


@pytest.mark.parametrize(
    "scripts",
    [
        pytest.param(QUICK, id="a choice"),
        *(pytest.param(scripts, id=name, marks=pytest.mark.thorough) for name, scripts in SCRIPTS.items()),
    ],
)
def test_bits_are_those_of_torchrun(
    scripts: list[Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [os.environ["PYTHONPATH"], str(EXAMPLES / "integrations")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    (workers,) = {script.machines * script.workers for script in scripts}
    plain = [tmp_path / f"plain-{number}" for number, _ in enumerate(scripts)]
    jobs = [Job(str(place), script.command(place)) for script, place in zip(scripts, plain, strict=True)]
    expected = run_plain(tmp_path, jobs, workers=workers)
    found = {
        script.name: _difference(_run(script, tmp_path / f"ours-{number}"), expected[number])
        for number, script in enumerate(scripts)
    }
    assert not any(found.values()), "\n".join(f"{name}: {why or 'the same'}" for name, why in found.items())


def _run(script: Script, folder: Path) -> ClusterRun:
    flags = ["--nproc-per-node", str(script.workers)]
    return run_cluster(folder, machines=script.machines, flags=flags, script=[*script.command(folder)])


def _difference(run: ClusterRun, reference: ClusterRun) -> str:
    """Empty if there is none."""
    if run.code != 0 or run.recoveries:
        return f"exit code {run.code}, {len(run.recoveries)} recoveries: {run.output[-2000:]}"
    try:
        assert_same_files(run, reference)
    except AssertionError as error:
        return str(error)[:300]
    return ""
