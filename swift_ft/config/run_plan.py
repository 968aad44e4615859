"""The plan with which a run begins: the layers of each stage, in each pipeline. Pure.

``swift-plan instantiate --json`` and ``swift-plan devices --json`` print such a file::

    {"pipelines": [{"stages": [[0, 4], [5, 9]], "microbatches": 6, "machines": [0, 1]},
                   {"stages": [[0, 2], [3, 6], [7, 9]], "microbatches": 10, "machines": [2, 3, 4]}],
     "workers_per_machine": 1}

A stage is its first and its last layer. ``machines`` has the machine of each worker of a pipeline.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from swift_ft.errors import UsageError

_KEYS = ("pipelines", "workers_per_machine", "stages_per_worker", "tp", "iteration_s")
_PIPELINE_KEYS = ("stages", "microbatches", "machines", "nodes", "devices")
_MOST = 1 << 20  # stages of a pipeline, and anything else that is counted


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """One pipeline.

    Attributes:
        cut: the number of layers of each stage.
        microbatches: of an iteration; 0 if the plan leaves them to the script.
        machines: of each worker; empty if workers are dealt to pipelines in the order of their ranks.
    """

    cut: tuple[int, ...]
    microbatches: int = 0
    machines: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The layers, the workers and the microbatches of each pipeline.

    Attributes:
        pipelines: replicas of each other.
        workers_per_machine: of the machines that the plan names.
        stages_per_worker: stages of each worker.
    """

    pipelines: tuple[PlannedPipeline, ...]
    workers_per_machine: int = 1
    stages_per_worker: int = 1

    @property
    def layers(self) -> int:
        """Of the model."""
        return sum(self.pipelines[0].cut)

    @property
    def workers(self) -> int:
        """Of all pipelines."""
        return sum(map(self._workers_of, self.pipelines))

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Of each pipeline; empty if the plan leaves them to the script."""
        found = tuple(pipeline.microbatches for pipeline in self.pipelines)
        return found if all(found) else ()

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each pipeline, in the order of its stages."""
        places = {
            machine: count(machine * self.workers_per_machine) for machine in self._machines()
        }  # the workers of a machine, in the order in which pipelines take them
        every = count()
        return tuple(
            tuple(next(places[machine]) for machine in pipeline.machines)
            or tuple(next(every) for _ in range(self._workers_of(pipeline)))
            for pipeline in self.pipelines
        )

    def check_workers(self, machines: int, workers_per_machine: int) -> None:
        """Check that the plan is one for a job.

        Args:
            machines: that the job has, with all that may still come.
            workers_per_machine: that each of them has.

        Raises:
            UsageError: it is one for another number of workers.
        """
        if self.workers != machines * workers_per_machine:
            raise UsageError(
                f"The plan is for {self.workers} workers, and the job has {machines * workers_per_machine} "
                f"(machines: {machines}, workers of each: {workers_per_machine}): start it with as many, or "
                "make a plan for it with swift-plan."
            )
        if self._machines() and self.workers_per_machine != workers_per_machine:
            raise UsageError(
                f"The plan is for machines of {self.workers_per_machine} workers, and those of the job have "
                f"{workers_per_machine}: give --nproc-per-node {self.workers_per_machine}."
            )

    def check_model(self, layers: int, stages_per_worker: int) -> None:
        """Check that the plan is one for a model.

        Args:
            layers: that the model has.
            stages_per_worker: that its pipelines have.

        Raises:
            UsageError: it is one for another model.
        """
        if layers != self.layers:
            raise UsageError(
                f"The plan is for a model of {self.layers} layers, and the LayerStack has {layers}: make a "
                "plan from the layers.json of this model."
            )
        if stages_per_worker != self.stages_per_worker:
            raise UsageError(
                f"The plan has {self.stages_per_worker} stages per worker, and the LayerStack "
                f"{stages_per_worker}: give swift-plan --stages-per-worker {stages_per_worker}."
            )

    def check_order(self) -> None:
        """Check that torch's groups, which are in the order of ranks, have the stages in their order.

        Raises:
            UsageError: they would not.
        """
        if any(first > second for ranks in self.ranks for first, second in pairwise(ranks)):
            raise UsageError(
                "The machines of a pipeline must be in ascending order: number them by its stages."
            )
        if any(one[0] > other[0] for one, other in pairwise(self.ranks)):
            raise UsageError("The pipelines of a plan must be in the order of their first machines.")

    def to_text(self) -> str:
        """The plan as JSON, for :func:`plan_from_json`: equal plans have equal texts."""
        return json.dumps(
            {
                "pipelines": [_to_json(pipeline) for pipeline in self.pipelines],
                "workers_per_machine": self.workers_per_machine,
                "stages_per_worker": self.stages_per_worker,
            },
            separators=(",", ":"),
        )

    def _workers_of(self, pipeline: PlannedPipeline) -> int:
        return len(pipeline.cut) // self.stages_per_worker

    def _machines(self) -> list[int]:
        return sorted({machine for pipeline in self.pipelines for machine in pipeline.machines})


def _to_json(pipeline: PlannedPipeline) -> dict[str, Any]:
    starts = [sum(pipeline.cut[:number]) for number in range(len(pipeline.cut))]
    stages = [[first, first + layers - 1] for first, layers in zip(starts, pipeline.cut, strict=True)]
    found: dict[str, Any] = {"stages": stages}
    if pipeline.microbatches:
        found["microbatches"] = pipeline.microbatches
    if pipeline.machines:
        found["machines"] = list(pipeline.machines)
    return found


def read_plan(path: str | Path) -> RunPlan:
    """The plan in a file.

    Raises:
        UsageError: it cannot be read, or has another form.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The plan {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"The plan {path} is not a text file.") from None
    return plan_from_json(text, str(path))


def plan_from_json(text: str, source: str = "the plan") -> RunPlan:
    """The plan in a text.

    Args:
        text: JSON.
        source: where it is from; errors begin with it.

    Raises:
        UsageError: it has another form, or cannot be run.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: not valid JSON: {error}") from None
    _check_keys(data, _KEYS, source)
    entries = data.get("pipelines")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{source}: needs a list 'pipelines' with at least one pipeline")
    if (tp := data.get("tp", 1)) != 1:
        raise UsageError(
            f"{source}: its stages are on {tp} devices each, and a LayerStack has a stage on one: "
            "give swift-plan devices --tp 1"
        )
    found = [_pipeline(entry, f"{source}: pipeline {number}") for number, entry in enumerate(entries)]
    plan = RunPlan(
        tuple(found),
        _whole(data.get("workers_per_machine", 1), source, "workers_per_machine"),
        _whole(data.get("stages_per_worker", 1), source, "stages_per_worker"),
    )
    for mistake in _mistakes(plan):
        raise UsageError(f"{source}: {mistake}")
    plan.check_order()
    return plan


def _check_keys(data: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected a JSON object")
    if unknown := sorted(data.keys() - set(known)):
        raise UsageError(f"{where}: unknown key {unknown[0]!r}: known are {', '.join(known)}")


def _whole(value: Any, where: str, key: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise UsageError(f"{where}: {key!r} is {value!r}: it must be a whole number from {least} on")
    return value


def _pipeline(entry: Any, where: str) -> PlannedPipeline:
    _check_keys(entry, _PIPELINE_KEYS, where)
    stages, devices = entry.get("stages"), entry.get("devices")
    if not isinstance(stages, list) or not stages:
        raise UsageError(f"{where}: needs a list 'stages' with at least one stage")
    if isinstance(devices, list) and (several := [one for one in devices if one != 1]):
        raise UsageError(
            f"{where}: a stage is on {several[0]} devices, and a LayerStack has a stage on one: plan with "
            "as many nodes as there are devices, and --devices-per-node 1"
        )
    cut, expected = [], 0
    for number, stage in enumerate(stages):
        if not (isinstance(stage, list) and len(stage) == 2):
            raise UsageError(f"{where}: stage {number} is {stage!r}: it must be [first layer, last layer]")
        first, last = (_whole(layer, where, f"stage {number}", 0) for layer in stage)
        if first != expected or last < first:
            raise UsageError(
                f"{where}: stage {number} has layers {first} to {last}: it must begin with layer {expected} "
                "and have one layer or more"
            )
        cut.append(last - first + 1)
        expected = last + 1
    machines = entry.get("machines", [])
    if not isinstance(machines, list):
        raise UsageError(f"{where}: 'machines' is {machines!r}: it must be the machine of each worker")
    share = entry.get("microbatches")
    return PlannedPipeline(
        tuple(cut),
        0 if share is None else _whole(share, where, "microbatches"),
        tuple(_whole(machine, where, "machines", 0) for machine in machines),
    )


def _mistakes(plan: RunPlan) -> Iterator[str]:
    """The contradictions in a plan, in words."""
    pipelines, per_machine, turns = plan.pipelines, plan.workers_per_machine, plan.stages_per_worker
    for number, pipeline in enumerate(pipelines):
        if (layers := sum(pipeline.cut)) != plan.layers:
            yield f"pipeline {number} has {layers} layers, and pipeline 0 has {plan.layers}"
        if len(pipeline.cut) % turns:
            yield f"pipeline {number} has {len(pipeline.cut)} stages, no multiple of the {turns} of a worker"
        elif pipeline.machines and len(pipeline.machines) != len(pipeline.cut) // turns:
            yield (
                f"pipeline {number} has {len(pipeline.cut) // turns} workers and {len(pipeline.machines)} "
                "machines: name the machine of each worker"
            )
    if len({bool(pipeline.microbatches) for pipeline in pipelines}) > 1:
        yield "some pipelines have 'microbatches' and others do not: give them for all, or for none"
    if len({bool(pipeline.machines) for pipeline in pipelines}) > 1:
        yield "some pipelines have 'machines' and others do not: give them for all, or for none"
    workers = Counter(machine for pipeline in pipelines for machine in pipeline.machines)
    for machine in range(max(workers, default=-1) + 1):
        if (found := workers[machine]) != per_machine:
            yield f"machine {machine} has {found} workers, and 'workers_per_machine' is {per_machine}"
            return
