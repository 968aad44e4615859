"""Undisturbed runs to compare with."""

from __future__ import annotations

from typing import Any

import pytest
from harness import ClusterRun, run_cluster


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Undisturbed runs, one per set of arguments, made when first asked for."""
    made: dict[tuple[str, ...], ClusterRun] = {}

    def reference(*args: str) -> ClusterRun:
        if args not in made:
            made[args] = run_cluster(tmp_path_factory.mktemp("undisturbed"), *args)
            assert made[args].code == 0, made[args].output[-6000:]
            assert not made[args].recoveries
        return made[args]

    return reference
