"""The wheel, installed where nothing of this working tree is, protects a training."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from docs.house import ROOT
from tests.deploy.processes import leaves_nothing
from tests.support.built_wheel import build_wheel, install, without_this_tree
from tests.support.cluster import training

NEEDED = ("train_swift.py", "train_minimal.py", "gpt.py", "placement.py", "instrument.py")
DEADLINE_S = 180


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return install(build_wheel(folder), folder / "environment")


def run(commands: Path, folder: Path, *flags: str) -> dict[str, torch.Tensor]:
    """A run of a copy of the example, by the installed command. Returns the weights."""
    scripts = folder / "scripts"
    scripts.mkdir(parents=True)
    for name in NEEDED:
        shutil.copy(ROOT / "examples" / name, scripts)
    launcher = [str(commands / "swift-run"), "--standalone", "--machines", "3", "--spares", "1"]
    launcher += ["--events-out", str(folder / "events.json"), *flags]
    env = without_this_tree() | {"OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(folder)}
    command = [*launcher, *training(folder, scripts / "train_swift.py")]
    with leaves_nothing(folder):
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return {
        f"{path.name}:{name}": value
        for path in sorted((folder / "weights").iterdir())
        for name, value in torch.load(path).items()
    }


def test_it_is_the_wheel_that_runs(commands: Path, tmp_path: Path) -> None:
    code = "import swift_ft; print(swift_ft.__file__)"
    env = without_this_tree()
    done = subprocess.run(
        [str(commands / "python"), "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(commands.parent)


def test_a_killed_machine_is_replaced(commands: Path, tmp_path: Path) -> None:
    undisturbed = run(commands, tmp_path / "undisturbed")
    disturbed = run(
        commands, tmp_path / "disturbed", "--inject", "kill machine=1 iteration=5 point=forward committed=3"
    )
    events = json.loads((tmp_path / "disturbed" / "events.json").read_text())
    assert [recovery["mode"] for recovery in events["recoveries"]] == ["replay"]
    assert undisturbed.keys() == disturbed.keys()
    assert undisturbed
    assert all(torch.equal(undisturbed[name], disturbed[name]) for name in undisturbed)
