"""`make demo`, `make demo-elastic` and `make demo-reshape`, as a new user runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cluster import EXAMPLES


@pytest.mark.thorough
@pytest.mark.parametrize("demo", ["demo", "demo_elastic", "demo_reshape --small"])
def test_it_ends_with_the_same_weights(demo: str) -> None:
    command = [sys.executable, "-m", *f"examples.{demo}".split()]
    done = subprocess.run(
        command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "weights identical: yes" in done.stdout
