"""The memory that is left: the smaller of what the kernel and a container's limit say."""

from __future__ import annotations

from pathlib import Path

from swift_ft.host.memory import available_bytes

GIB = 2**30


def test_the_smaller_one_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    assert available_bytes(meminfo, tmp_path) == 64 * GIB
    (tmp_path / "memory.current").write_text(f"{10 * GIB}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 64 * GIB
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    assert available_bytes(meminfo, tmp_path) == 8 * GIB


def test_where_nothing_says_so(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "meminfo", tmp_path) is None
