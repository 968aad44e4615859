"""Dataclasses from their fields as plain values: what travels or is kept comes back as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import pytest

from swift_ft.checkpoint.own_gradients import OwnStep
from swift_ft.checkpoint.recording_file import StoredRecording
from swift_ft.checkpoint.worker_history import GenerationWork, WorkerHistory
from swift_ft.checkpoint.worker_record import WorkerRecord
from swift_ft.config.audit import AuditRequest, AuditResult
from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import ETCD, StoreAddress
from swift_ft.config.worker_context import OfflineReplay
from swift_ft.coordination.progress import Stand
from swift_ft.costs.job import Measured, Worker
from swift_ft.launch.processes.worker import WorkerJob
from swift_ft.observe.checked import CheckedWorker, PartFacts
from swift_ft.observe.spans import Recording, Span
from swift_ft.plain import from_plain
from swift_ft.runtime.verify.verdict import Account, Difference

SHAPES = {"inputs": [[2, 3]], "outputs": None}
DIFFERENCE = Difference("=bucket 0", (0, 1), False, ("weight", "bias"))
SPANS = (Span("load", 5, 9, "", {"bytes": 8}), Span("send", 6, 7, "sender", {}))

KEPT = [
    WorkerRecord(
        stages=(1, 5),
        holds=("model",),
        pipeline=1,
        group=2,
        microbatches=4,
        shapes={1: SHAPES, 5: {}},
        linked=(3,),
        together=(2,),
    ),
    WorkerHistory("run", 3, 1, (GenerationWork(1, 5.0, None, 7), GenerationWork(2))),
    Worker(("model",), (0,), 1, Measured(0.5, sent={1: 8, 2: 9}, state_bytes=3)),
    Worker(()),
    StoredRecording(
        "run", 2, "worker 3", 3, "m", None, "boot", Recording(5, 9, 7, SPANS, ((0, 1, 6),), ((4, 6),), 0)
    ),
    OwnStep(1, "a processor", "ff", {"batch": 1}, {"weight": 2}),
    OfflineReplay("/store", "/out", 3, audit=True),
]
"""Of stores, and of what processes write for each other."""

TOLD = [
    AuditRequest(
        store="/s",
        machine=1,
        begin=10,
        until=20,
        out="/o",
        kind="script",
        target="train.py",
        args=("--wide",),
        setup=("torch: 2.9",),
        log_since=0,
        moved=0,
        machines=4,
        workers=1,
        epoch=0,
        limit_s=60.0,
        start_values={"variables/start/3": "{}"},
        gradients=False,
    ),
    AuditResult((0, 1), 1, 12, "a message"),
    AuditResult(problem="the log is gone"),
    StoreAddress(("a:2379", "b:2379"), ETCD, ca="/ca.pem"),
    RunConfig(machines=4, tls_ca=None),
    WorkerJob({"RANK": "1"}, "train.py", ("--wide",), secret="ff", sources=2),
    Account(((DIFFERENCE,), (), (DIFFERENCE, DIFFERENCE)), gives=True, proven=3),
    CheckedWorker(
        rank=1,
        machine=0,
        world_size=2,
        iterations=3,
        step_s=None,
        store="/s",
        checkpoint_every=10,
        snapshot_every=5,
        parts=(PartFacts(name="model", kind="weights", made_of="Linear", nbytes=8),),
        said=(("event", "line"),),
        too_large=("table",),
        forecast={"losses": [1, 2]},
    ),
    Stand(7, "at train.py:3 (load)", waits=True, stack=("train.py:3 (load)", "train.py:9 (main)")),
]
"""By one process to another."""


@pytest.mark.parametrize("value", [*KEPT, *TOLD], ids=lambda value: type(value).__name__)
def test_nothing_is_lost_on_the_way_through_json(value: Any) -> None:
    plain = json.loads(json.dumps(asdict(value)))
    again = from_plain(type(value), plain)
    assert again == value
    assert asdict(again) == asdict(value)  # of fields that do not count in a comparison, too


@pytest.mark.parametrize("value", [*KEPT, *TOLD], ids=lambda value: type(value).__name__)
def test_what_a_later_version_adds_is_left_out(value: Any) -> None:
    assert from_plain(type(value), {**asdict(value), "of_a_later_version": 1}) == value


class Pair(NamedTuple):
    first: int
    second: str


@dataclass(frozen=True)
class Inner:
    number: int
    later: str = "default"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    perhaps: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[int, Inner] | None = None
    named: tuple[Pair, ...] = ()
    by_number: Mapping[int, Inner] = field(default_factory=dict)
    listed: list[int] = field(default_factory=list)


def test_each_type_comes_back_inside_of_others() -> None:
    value = Outer(
        Inner(1), Inner(2), (Inner(3), Inner(4, "x")), (5, Inner(6)), (Pair(7, "y"),), {8: Inner(9)}, [10, 11]
    )
    assert from_plain(Outer, json.loads(json.dumps(asdict(value)))) == value
    assert from_plain(Outer, {"inner": {"number": 1, "more": 2}, "perhaps": None}) == Outer(Inner(1))


def test_an_object_in_the_place_of_plain_values_stays() -> None:
    inner = Inner(1)
    assert from_plain(Outer, {"inner": inner}).inner is inner


@pytest.mark.parametrize("data", [{}, {"perhaps": {"number": 1}}, {"inner": {"later": "x"}}])
def test_a_field_without_a_default_has_to_be_there(data: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        from_plain(Outer, data)
