"""Tests that need a GPU. Where there is none they are skipped, each with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.on_one_gpu import REHEARSED, OnOneGpu, check_members
from tests.support import cluster
from tests.support.cluster import BACKEND

_DEADLINE_S = 90
_FAILURES = "SWIFT_GPU_FAILURES"
"""A variable: a file that failures are appended to at once, since a run that is cut off prints no summary."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that collects the reports."""
    if report.failed and _FAILURES in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[_FAILURES]).open("a") as file:
            file.write(f"=== {report.nodeid}, {report.when}\n{report.longreprtext}\n")


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available():
        return
    if "gpu" in request.fixturenames and os.environ.get(REHEARSED) == "cpu":
        return
    pytest.skip("no CUDA device")


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnOneGpu]:
    """Runs clusters whose workers share a GPU, over NCCL. Later tests have their own backend."""
    if not torch.cuda.is_available() and os.environ.get(REHEARSED) != "cpu":
        pytest.skip("no CUDA device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "DEADLINE_S", _DEADLINE_S)  # all tests together have five minutes
        if not torch.cuda.is_available():
            patch.setenv(BACKEND, "nccl_like")
        elif said := check_members():
            pytest.fail(f"no two members of NCCL share the GPU here:\n{said}")
        yield OnOneGpu(tmp_path_factory, "cuda" if torch.cuda.is_available() else "cpu")
