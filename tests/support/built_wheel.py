"""The package as pip builds it, and an environment that has it and nothing of this working tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from docs.house import PACKAGE, ROOT


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy, since a build writes beside its sources."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", PACKAGE.name):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    _pip(folder, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment, which has what it needs from the one that runs this.

    Returns:
        The folder of its commands.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    _pip(wheel.parent, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # The folder by itself: what installers have entered there to be found elsewhere, as this tree, is not.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def without_this_tree() -> dict[str, str]:
    """The environment of processes that must not find this tree, nor what an installer has noted in it."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def _pip(folder: Path, *args: str) -> None:
    """Run pip in a folder: beside an ``egg-info`` of the package it would take it for installed."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    env = without_this_tree()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=env
    )
    assert done.returncode == 0, done.stderr[-4000:]
