"""Several runs under one name, in a rendezvous store that outlives them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ITERATIONS, training

BARE = Path(__file__).parent / "scripts" / "bare.py"


@pytest.mark.thorough
def test_a_name_is_used_again(tmp_path: Path) -> None:
    """After a failure, the next run succeeds. After a success, --fresh trains from the beginning."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(tmp_path)}
    store = subprocess.Popen(
        [sys.executable, "-m", "swift_ft.cli.store", "--port", str(port)], stdout=subprocess.DEVNULL, env=env
    )
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    launcher = [sys.executable, "-m", "swift_ft.cli.run", *flags, "--log-dir", str(tmp_path / "logs")]

    def run(*script: str) -> tuple[list[int], str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        both = [subprocess.Popen([*launcher, *script], text=True, env=env, **pipes) for _ in range(2)]  # type: ignore[call-overload]
        outputs = [process.communicate(timeout=120)[0] for process in both]
        return [process.returncode for process in both], "".join(outputs)

    try:
        codes, output = run(str(BARE), "raise")
        assert codes == [1, 1], output
        codes, output = run(*training(tmp_path))
        assert codes == [0, 0], output
        codes, output = run("--fresh", *training(tmp_path))
        assert codes == [0, 0], output
        assert [f"iteration {i}: loss" in output for i in range(ITERATIONS)] == [True] * ITERATIONS
    finally:
        store.terminate()
        store.wait(timeout=30)
