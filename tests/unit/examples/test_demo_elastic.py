"""The demo of a run that goes on with fewer machines: how it finds the run that it watches."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from examples import demo_elastic
from examples.commands import CommandError, started
from swift_ft.cli.watch import View
from swift_ft.config.store_address import StoreAddress


def test_it_watches_the_run_that_its_machines_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(demo_elastic, "Watch", lambda *args: asked.append(args))
    with ExitStack() as stack:
        machines = demo_elastic.Machines(tmp_path, stack, "127.0.0.1:29500", [])
        machines.joined.write_text("127.0.0.1:29500 elastic-1\n")
        demo_elastic.watching(machines, View())
    ((address, run_id, _),) = asked
    assert (address, run_id) == (StoreAddress.tcp("127.0.0.1", 29500), "elastic-1")


def test_a_machine_that_cannot_start_is_said_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        machines = demo_elastic.Machines(tmp_path, stack, "127.0.0.1:29500", [])
        command = [sys.executable, "-c", "raise ImportError('no such package')"]
        machines.processes[0] = stack.enter_context(started(command, tmp_path / "machine0.txt"))
        with pytest.raises(CommandError, match="machine 0 has ended before it") as caught:
            demo_elastic.watching(machines, View())
    assert "no such package" in str(caught.value)
