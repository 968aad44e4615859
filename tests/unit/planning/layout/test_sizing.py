"""How many machines a job needs, and which."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swift_ft.cli.plan.main import main
from swift_ft.costs.layer_profile import LayerProfile, write_layers
from swift_ft.errors import UsageError
from swift_ft.planning.layout.machine_kinds import read_kinds
from swift_ft.planning.layout.makespan import StageTime, makespan_ns
from swift_ft.planning.layout.sizing import Goal, MachineKind, Work, knee, recommended, sizes

MS = 1_000_000
LAYERS = tuple(LayerProfile(2 * MS, 4 * MS, 4_000_000) for _ in range(12))
WORK = Work(LAYERS, batch=64, microbatches=16)
PLAIN = MachineKind("plain", 8)


def test_one_machine_is_the_sum_of_all_layers() -> None:
    one = sizes(WORK, PLAIN)[0]
    assert (one.machines, one.pipelines) == (1, (1,))
    assert one.iteration_s == pytest.approx(16 * 12 * 0.006)
    assert one.samples_per_s == pytest.approx(64 / one.iteration_s)


def test_one_pipeline_takes_what_its_schedule_takes() -> None:
    found = sizes(replace(WORK, pipelines=1), PLAIN)
    assert [size.machines for size in found] == list(range(1, 9))
    stages = [StageTime(6 * MS, 12 * MS)] * 4
    assert found[3].iteration_s == pytest.approx(makespan_ns(stages, 16) / 1e9)


def test_replicas_have_no_bubble_and_average() -> None:
    """Without a link's time, pipelines of one machine each are best; the batch is shared."""
    four = sizes(WORK, PLAIN)[3]
    assert four.pipelines == (1, 1, 1, 1)
    assert four.iteration_s == pytest.approx(4 * 12 * 0.006)
    slow = sizes(replace(WORK, link_bytes_per_s=1e9, overhead_s=0.25), PLAIN)[3]
    gradients = 12 * 4_000_000 / 4
    assert slow.iteration_s == pytest.approx(four.iteration_s + 1.5 * gradients / 1e9 + 0.25)


def test_a_slow_kind_and_a_small_one() -> None:
    half = sizes(WORK, replace(PLAIN, speed=0.5))
    assert half[0].iteration_s == pytest.approx(2 * sizes(WORK, PLAIN)[0].iteration_s)
    small = sizes(WORK, replace(PLAIN, memory_bytes=20_000_000))  # five layers
    assert small[0].machines == 3


def test_the_knee_is_where_more_machines_bring_little() -> None:
    found = sizes(replace(WORK, pipelines=1, overhead_s=0.2), MachineKind("many", 12))
    bend = knee(found)
    after = found[found.index(bend) + 1 :]
    assert after
    for size in after:  # less than the square root
        assert size.samples_per_s / bend.samples_per_s < (size.machines / bend.machines) ** 0.5


def test_what_is_recommended() -> None:
    fast = MachineKind("fast", 8, speed=1.0, price_per_hour=4.0)
    cheap = MachineKind("cheap", 8, speed=0.5, price_per_hour=1.0)
    work = replace(WORK, overhead_s=0.1)
    by_kind = [sizes(work, kind) for kind in (fast, cheap)]
    best, why = recommended(by_kind, Goal())
    assert best.kind is cheap
    assert "knee" in why
    samples = 1e6
    quickest = min(size.takes_s(samples) for size in by_kind[0])
    best, why = recommended(by_kind, Goal(samples, within_s=quickest))
    assert (best.kind, best.machines) == (fast, 8)
    best, _ = recommended(by_kind, Goal(samples, within_s=1e9))
    assert best.price_of(samples) == min(s.price_of(samples) for found in by_kind for s in found)
    best, _ = recommended(by_kind, Goal(samples, budget=1e9))
    assert best.takes_s(samples) == quickest
    with pytest.raises(UsageError, match="no size does it in time: the fastest takes"):
        recommended(by_kind, Goal(samples, within_s=1.0))
    with pytest.raises(UsageError, match="no size is within the budget: the cheapest costs"):
        recommended(by_kind, Goal(samples, budget=0.001))


@pytest.mark.parametrize(
    ("work", "kind", "message"),
    [
        (replace(WORK, batch=65), PLAIN, "65 samples makes no 16 equal microbatches"),
        (replace(WORK, microbatches=0), PLAIN, "microbatches is 0"),
        (replace(WORK, pipelines=9), PLAIN, "8 machines of plain and 16 microbatches make no 9 pipelines"),
        (WORK, replace(PLAIN, speed=0.0), "speed of plain is 0"),
        (WORK, replace(PLAIN, memory_bytes=1_000_000), "memory|fit|larger"),
    ],
)
def test_what_cannot_be(work: Work, kind: MachineKind, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sizes(work, kind)


KINDS = {
    "kinds": [
        {"name": "A100", "most": 4, "price_per_hour": 4, "memory_bytes": 80e9},
        {"name": "H20", "most": 8, "price_per_hour": 1.5, "speed": 0.48},
    ]
}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_layers(list(LAYERS), tmp_path / "layers.json")
    (tmp_path / "kinds.json").write_text(json.dumps(KINDS))
    given = ["size", "--layers", str(tmp_path / "layers.json"), "--batch", "64", "--microbatches", "16"]
    kinds = ["--kinds", str(tmp_path / "kinds.json")]
    assert main([*given, *kinds, "--link", "1GB/s", "--overhead", "20ms"]) == 0
    shown = capsys.readouterr().out
    assert "the knee" in shown
    assert "recommended: " in shown
    assert main([*given, *kinds, "--samples", "1e8", "--within", "500h", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["sizes"]) == 12
    assert found["recommended"]["why"] == "the cheapest that is done in time"
    assert main([*given, "--machines", "8"]) == 0
    assert "of this kind" in capsys.readouterr().out
    for wrong, message in (
        ([], "either --machines or --kinds"),
        ([*kinds, "--within", "3h"], "need --samples"),
        ([*kinds, "--samples", "5", "--within", "3h", "--budget", "4"], "either --within or --budget"),
    ):
        assert main([*given, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most": 0}, "'most' is 0"),
        ({"speed": -1}, "'speed' is -1"),
        ({"name": ""}, "no 'name'"),
        ({"price": 3}, "unknown key 'price'"),
    ],
)
def test_a_broken_file(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "kinds.json"
    path.write_text(json.dumps({"kinds": [{**KINDS["kinds"][0], **change}]}))
    with pytest.raises(UsageError, match=message):
        read_kinds(path)
