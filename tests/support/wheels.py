"""What a machine needs for the tests and figures on a GPU, where it has torch and reaches no package index.

    python -m tests.support.wheels needed            prints the requirements, for `pip download`
    python -m tests.support.wheels missing FOLDER    prints the wheels in it of what is not installed here

It imports nothing but the standard library.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
THERE = ("torch", "numpy", "pyarrow", "fsspec", "xxhash")
"""Large, or tied to the machine: its own are taken."""
OF_THE_TESTS = ("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "expecttest", "py-spy")


def needed() -> Iterator[str]:
    """Requirements of the package and of its tests on a GPU."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from (one for one in project["dependencies"] if _name(one) not in THERE)
    yield from (one for one in project["optional-dependencies"]["test"] if _name(one) in OF_THE_TESTS)


def missing(wheels: Iterable[Path]) -> Iterator[Path]:
    """Those wheels whose package is not installed."""
    for wheel in sorted(wheels):
        try:
            version(wheel.name.split("-")[0])
        except PackageNotFoundError:
            yield wheel


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0]


if __name__ == "__main__":
    what, *folder = sys.argv[1:]
    print(*(needed() if what == "needed" else missing(Path(folder[0]).glob("*.whl"))), sep="\n")
