"""Scripts under plain torchrun, one after the other in forks of the same workers: imports take the time.

python -m torch.distributed.run ... -m tests.support.plain_run JOBS
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from benchmarks.lib.ports import free_port
from swift_ft.launch.processes.preload import preload
from tests.support.cluster import ClusterRun

_DEADLINE_S = 500


@dataclass(frozen=True)
class Job:
    """A script.

    Attributes:
        folder: where it writes.
        command: the script and its arguments.
        port: of its store.
    """

    folder: str
    command: Sequence[str]
    port: int = field(default_factory=free_port)


def run_plain(folder: Path, jobs: Sequence[Job], *, workers: int) -> list[ClusterRun]:
    """What each script leaves behind without a session.

    Args:
        folder: for the list of the jobs.
        jobs: what to run.
        workers: of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / f"jobs-{workers}.json"
    listed.write_text(json.dumps([asdict(job) for job in jobs]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    done = subprocess.run(
        [*launcher, "-m", "tests.support.plain_run", str(listed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [ClusterRun(Path(job.folder), 0, done.stdout, {}) for job in jobs]


def main(listed: str) -> int:
    """Run all jobs. Each has a store of its own, as the scripts of several launchers have."""
    preload()
    for job in json.loads(Path(listed).read_text()):
        child = os.fork()
        if child == 0:
            _become(Job(**job))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != 0:
            print(f"{job['command']} ended with exit code {code}", flush=True)
            return 1
    return 0


def _become(job: Job) -> NoReturn:
    code = 1
    try:
        folder = Path(job.folder)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(job.port)
        os.environ["SWIFT_TEST_FOLDER"] = str(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
        from tests.support.plain_session import put_in_place  # here: it changes what the script imports

        put_in_place()
        sys.argv = list(job.command)
        sys.path.insert(0, str(Path(job.command[0]).parent))
        runpy.run_path(job.command[0], run_name="__main__")
        code = 0
    except BaseException:  # what an interpreter would do
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
