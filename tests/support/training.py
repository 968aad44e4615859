"""A real training on any store."""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster import ClusterRun, assert_identical, run_cluster


def replayed_from(url: str, folder: Path, *, machine: int, at: str, helpers: int = 0) -> ClusterRun:
    """A machine is killed and replayed from a store; the weights are those of an undisturbed run on disk."""
    reference = run_cluster(folder / "undisturbed")
    run = run_cluster(
        folder / "killed",
        *("--store", url),
        inject=f"kill machine={machine} iteration=5 {at}",
        flags=["--helpers", str(helpers)],
    )
    assert_identical(run, reference)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay", run.output[-3000:]
    assert recovery["slots"] == [machine]
    return run
