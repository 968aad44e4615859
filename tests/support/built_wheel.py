"""The package as pip builds it, and an environment that has it and nothing of this working tree."""

from __future__ import annotations

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
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment, which has what it needs from the one that runs this.

    Returns:
        The folder of its commands.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # The folder by itself: what installers have entered there to be found elsewhere, as this tree, is not.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def _pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
