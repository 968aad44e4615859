"""The memory that is left: the smaller of what the kernel and a container's limit say."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.host.memory import available_bytes

GIB = 2**30


def test_the_smaller_one_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    assert available_bytes(tmp_path, tmp_path) == 64 * GIB
    (tmp_path / "memory.current").write_text(f"{10 * GIB}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path) == 64 * GIB
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    assert available_bytes(tmp_path, tmp_path) == 8 * GIB


def test_where_nothing_says_so(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("said", "job", "limit", "used"),
    [
        ("4:memory:/slurm/uid_1/job_7\n0::/\n", "memory/slurm/uid_1", "limit_in_bytes", "usage_in_bytes"),
        ("0::/system.slice/job.scope/step\n", "system.slice/job.scope", "max", "current"),
    ],
)
def test_the_limit_of_a_group_around_its_own_counts(
    said: str, job: str, limit: str, used: str, tmp_path: Path
) -> None:
    """A scheduler gives a job a group, and each of its steps one within it."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(said)
    own = tmp_path / said.partition("\n")[0].rpartition(":")[2].lstrip("/")
    own = tmp_path / "memory" / own.relative_to(tmp_path) if job.startswith("memory") else own
    own.mkdir(parents=True)
    for folder, allowed in ((own, 1 << 62 if limit != "max" else "max"), (tmp_path / job, 16 * GIB)):
        (folder / f"memory.{limit}").write_text(f"{allowed}\n")
        (folder / f"memory.{used}").write_text(f"{10 * GIB}\n")
    assert available_bytes(tmp_path, tmp_path) == 6 * GIB
