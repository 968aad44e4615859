"""Jobs whose number of nodes changes: files that describe them, and two of Oobleck's evaluation.

::

    {"throughput": {"16": 214.8, "24": 304.5, "30": 368.3}, "nodes": 30, "batch": 8192, "change_s": 2}

Instead of ``throughput`` the templates can say it: ``"layers": "layers.json"`` beside the file, ``min_nodes``
of a pipeline, ``microbatches`` of a step and ``tolerate`` losses at once (default 1).

Besides: ``grow_s``, ``adopt_s``, ``restart_s``, ``checkpoint_interval_s``, ``hold_s``
(:class:`swift_ft.planning.simulation.elastic.ElasticJob`). A trace is a CSV file of seconds and nodes::

    time,nodes
    3600,-1
    5400,+2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from swift_ft.costs.json_files import load_object, read_text, whole
from swift_ft.costs.layer_profile import NANOSECONDS, LayerProfile, read_layers
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_positive
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.instantiate import best_instantiation
from swift_ft.planning.layout.pipeline_template import TemplateOptions
from swift_ft.planning.layout.pipeline_time import PipelineTime
from swift_ft.planning.layout.templates import node_counts, templates_for
from swift_ft.planning.simulation.elastic import Change, ElasticJob
from swift_ft.planning.simulation.inputs import timed_rows

_MOST = 1e300  # beyond it are infinity, and whole numbers that are no float

_BERT: tuple[float, ...] = (368.25, 362.22, 328.35, 327.78, 329.14, 307.21, 304.45, 278.53)
_BERT += (285.84, 260.31, 261.68, 243.56, 228.05, 209.21, 214.80, 192.30)
_GPT: tuple[float, ...] = (9.2143, 8.9072, 8.6000, 8.2929, 7.9857, 7.6271, 7.5123, 7.4354)
_GPT += (7.0528, 6.7048, 6.7973, 6.1050, 6.1151, 5.6307, 5.6306, 5.1307)

ELASTIC_PRESETS = {
    "oobleck-bert-large": ElasticJob(
        dict(zip(range(30, 14, -1), _BERT, strict=True)), nodes=30, batch=8192, change_s=2.0, grow_s=2.0
    ),
    "oobleck-gpt3-2.7b": ElasticJob(
        dict(zip(range(30, 14, -1), _GPT, strict=True)), nodes=30, batch=512, change_s=6.0, grow_s=6.0
    ),
}
"""Oobleck's jobs on 30 A40 nodes, as in its Table 2: samples per second on 30 to 15 nodes."""

_OF_TEMPLATES = ("layers", "min_nodes", "microbatches", "tolerate")
_NUMBERS = tuple(field.name for field in fields(ElasticJob) if field.name != "throughput")


def read_elastic_job(path: Path) -> ElasticJob:
    """A job from a file.

    Raises:
        UsageError: if it cannot be read, or describes no job.
    """
    data, source = load_object(read_text(path), str(path)), str(path)
    known = ("throughput", *_NUMBERS, *_OF_TEMPLATES)
    unknown = sorted(data.keys() - set(known))
    if unknown:
        raise UsageError(f"{source} has the unknown key {unknown[0]!r}: known are {', '.join(known)}")
    given = {name: _number(data[name], f"{source}: {name!r}") for name in _NUMBERS if name in data}
    throughput = _by_templates(data, path) if "layers" in data else _table(data.get("throughput"), source)
    nodes = given.pop("nodes", float(max(throughput, default=0)))
    if not nodes.is_integer():
        raise UsageError(f"{source}: 'nodes' is {nodes}: it must be a whole number")
    try:
        return ElasticJob(throughput, int(nodes), **given)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _table(table: Any, source: str) -> dict[int, float]:
    if not isinstance(table, dict) or not all(str(nodes).isdecimal() for nodes in table):
        raise UsageError(
            f"{source}: 'throughput' must be samples per second by number of nodes, as {{\"8\": 120.5}}"
        )
    return {int(nodes): _number(rate, f"{source}: 'throughput' of {nodes}") for nodes, rate in table.items()}


def _by_templates(data: dict[str, Any], path: Path) -> dict[int, float]:
    """Samples per second by number of nodes, from the profile of the layers."""
    if "throughput" in data or not isinstance(data["layers"], str):
        raise UsageError(f"{path}: give either 'throughput' or 'layers', the name of a file")
    counts = {}
    for name in ("nodes", "min_nodes", "microbatches", "tolerate", "batch"):
        value = whole(data.get(name, 1 if name == "tolerate" else None))
        if isinstance(value, bool) or not isinstance(value, int) or value < (name != "tolerate"):
            raise UsageError(f"{path}: {name!r} is {value!r}: templates need it as a whole number")
        counts[name] = value
    iterations = iteration_by_nodes(
        read_layers(path.parent / data["layers"]),
        counts["nodes"],
        min_nodes=counts["min_nodes"],
        tolerate=counts["tolerate"],
        microbatches=counts["microbatches"],
    )
    return {nodes: counts["batch"] * NANOSECONDS / time_ns for nodes, time_ns in iterations.items()}


def read_spot_trace(path: Path) -> tuple[Change, ...]:
    """Changes from a CSV file of seconds and nodes, with or without a header line.

    Raises:
        UsageError: if a line is not a change; the message names it.
    """
    rows = timed_rows(path, "'time,+n' or 'time,-n'")
    return tuple(sorted(Change(time_s, nodes) for _, time_s, nodes in rows))


def losing_every(interval_s: float, nodes: int, last: int) -> tuple[Change, ...]:
    """One node less after each interval, until so many are left.

    Raises:
        UsageError: if the interval is not positive.
    """
    check_positive({"the interval of losses": interval_s}, "time")
    return tuple(Change(interval_s * i, -1) for i in range(1, nodes - last + 1))


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST < value < _MOST:
        raise UsageError(f"{where} is {value!r}: it must be a number")
    return float(value)


def iteration_by_nodes(
    layers: Sequence[LayerProfile], nodes: int, *, min_nodes: int, tolerate: int, microbatches: int
) -> dict[int, int]:
    """Nanoseconds of an iteration on each number of nodes that can hold the model, one device per node.

    The templates are those of the largest number of nodes. A number that cannot hold ``tolerate + 1``
    pipelines goes on with as many as it can; Oobleck would stop.

    Args:
        nodes: the largest number.
        min_nodes: per pipeline.
        tolerate: losses at once that leave a copy of every layer, while there are nodes enough.
        microbatches: over all pipelines together.

    Raises:
        UsageError: if not even the largest number of nodes can train.
    """
    costs, options = StageCosts(layers), TemplateOptions(schedule=Schedule.ONE_F_ONE_B)
    counts = node_counts(nodes, 0, min_nodes, len(layers))
    times = {
        template.nodes: PipelineTime.of(costs, template, options.schedule)
        for template in templates_for(costs, counts, options)
    }
    found = {}
    for count in range(min_nodes, nodes + 1):
        fewest = min(tolerate, count // min_nodes - 1) + 1
        try:
            found[count] = best_instantiation(times, count, fewest, microbatches).iteration_ns
        except UsageError:
            if count == nodes:
                raise
    return found
