"""Health checks on a GPU: a healthy one takes part."""

from __future__ import annotations

from pathlib import Path

from swift_ft.launch.health.checks import SHIPPED
from swift_ft.launch.health.facts import HealthFacts
from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import assert_identical


def test_each_check_that_ships_finds_nothing(tmp_path: Path) -> None:
    facts = HealthFacts(machine="here", after_loss=False, folder=str(tmp_path))
    assert {name: check(facts) for name, check in SHIPPED.items()} == dict.fromkeys(SHIPPED, "")


def test_before_a_machine_takes_part_and_after_its_loss(tmp_path: Path, gpu: OnOneGpu) -> None:
    checked = ["--health-checks", "memory,disk,product,devices,links,clock"]
    fault = "kill machine=1 iteration=5 point=optimizer"
    run = gpu.run(tmp_path, "train_ddp", inject=fault, flags=checked)
    assert_identical(run, gpu.undisturbed("train_ddp"))
    assert len(run.recoveries) == 1
