"""The kernel's count of processes that it ended for want of memory, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.config import detection_timings as timings
from swift_ft.launch.detection.kernel import OomKills, warn_if_ended_together

VERSION_2, VERSION_1 = "0::/job\n", "9:name=systemd:/\n4:memory:/job\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "counter", "limit"),
    [
        (VERSION_2, "cgroup/job/memory.events", "cgroup/job/memory.max"),
        (VERSION_2, "cgroup/memory.events", "cgroup/memory.max"),  # in a container
        (VERSION_1, "cgroup/memory/job/memory.oom_control", "cgroup/memory/job/memory.limit_in_bytes"),
        (VERSION_1, "cgroup/memory/memory.oom_control", "cgroup/memory/memory.limit_in_bytes"),
    ],
)
def test_a_kill_is_told_for_a_while_and_with_its_limit(
    tmp_path: Path, groups: str, counter: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was seen before its process is reported."""
    for name, text in (("self/cgroup", groups), (counter, "low 3\noom_kill 2\n"), (limit, "2000000000\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    kills = OomKills(tmp_path, tmp_path / "cgroup")
    assert kills.why(killed=True) == ""
    (tmp_path / counter).write_text("low 4\noom_kill 3\n")
    kills.look()
    said = "the kernel was out of memory, of which 2.00 GB are allowed"
    assert kills.why(killed=True) == kills.why(killed=False) == said, (
        "by any signal: a helper was killed, say"
    )
    monkeypatch.setattr(timings, "OOM_KILL_S", 0.0)
    assert kills.why(killed=True) == ""


def test_without_control_groups_the_host_counts(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 4\noom_kill 0\n")
    kills = OomKills(tmp_path, tmp_path / "none")
    (tmp_path / "vmstat").write_text("nr_free_pages 4\noom_kill 1\n")
    assert kills.why(killed=True) == "the kernel was out of memory"
    assert kills.why(killed=False) == ""
    (tmp_path / "vmstat").unlink()
    assert OomKills(tmp_path, tmp_path / "none").why(killed=True) == ""


@pytest.mark.parametrize(
    ("groups", "name", "said", "warned"),
    [
        (VERSION_2, "cgroup", "1", True),  # a container's own, as the kubelet sets it
        (VERSION_2, "cgroup/job", "1", True),
        (VERSION_2, "cgroup/job", "0", False),
        (VERSION_2, "cgroup/job", None, False),
        (VERSION_1, "cgroup/memory/job", "1", False),  # which has no such file
    ],
)
def test_a_group_whose_processes_end_together_is_warned_of(
    tmp_path: Path, groups: str, name: str, said: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher ends with the worker, so nobody is left who could tell of the memory."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(groups)
    (folder / ("memory.max" if groups == VERSION_2 else "memory.limit_in_bytes")).write_text("2000000000\n")
    if said is not None:
        (folder / "memory.oom.group").write_text(f"{said}\n")
    warn_if_ended_together(tmp_path, tmp_path / "cgroup")
    assert ["singleProcessOOMKill" in line for line in caplog.messages] == [True] * warned
