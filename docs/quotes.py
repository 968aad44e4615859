"""Sentences and tables of README and docs/ that quote measured figures, filled from the newest runs.

A page has a place ``<!-- begin figures NAME -->`` ... ``<!-- end figures NAME -->`` for each of ``QUOTES``,
and ``python -m docs.results`` writes it anew. In a text, ``{back:.1f}`` is the figure of ``FIGURES`` called
``back``, ``{back.low:.1f}`` and ``{back.high:.1f}`` are the ends of its range, and ``{recovery_run.runs}``
says how often the newest run of that subject has measured.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.lib.figures import Cell, Figure
from benchmarks.lib.runs import Run

_PLACE = re.compile(r"<!-- begin figures ([\w-]+) -->\n(.*?)<!-- end figures \1 -->", re.DOTALL)
_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Quote:
    """Where a figure stands in the newest run of a subject.

    Attributes:
        subject: whose newest run it is.
        row: name of a row of its tables; of a target if there is no column.
        columns: one, or several whose medians are put together into a range.
        occurrences: which of the rows of that name, from 1; several are put together, too.
        spread: put together not the medians but all that was measured.
    """

    subject: str
    row: str
    columns: tuple[str, ...] = ()
    occurrences: tuple[int, ...] = (1,)
    spread: bool = False

    def figure(self, runs: Mapping[str, Run]) -> Figure:
        """The figure.

        Raises:
            LookupError: if the newest run has none there.
        """
        run = runs[self.subject]
        if self.columns:
            cells = [run.cell(self.row, column, nth) for nth in self.occurrences for column in self.columns]
        else:
            cells = [one.measured for one in run.targets if one.name == self.row]
        found = [self._known(cell) for cell in cells]
        if not found:
            raise LookupError(f"{run.name} has no target {self.row!r}")
        if len(found) == 1:
            return found[0]
        ends = [end for one in found for end in _ends(one, spread=self.spread)]
        return Figure(None, min(ends), max(ends), found[0].unit, found[0].digits)

    def _known(self, cell: Cell) -> Figure:
        if isinstance(cell, Figure):
            return cell
        raise LookupError(f"{self.row!r} of {self.subject} is no figure, but {cell!r}")


def _ends(figure: Figure, *, spread: bool) -> list[float]:
    numbers = (figure.low, figure.high) if spread or figure.value is None else (figure.value,)
    return [one for one in numbers if one is not None] or [figure.value or 0.0]


@dataclass(frozen=True, slots=True)
class _Words:
    """What a text may say of a run."""

    run: Run

    @property
    def runs(self) -> str:
        """How often it has measured."""
        many = self.run.repetitions
        return "runs not noted" if many is None else "one run" if many == 1 else f"median of {many}"


def places(text: str) -> list[str]:
    """Names of the places for figures that a page has."""
    return [match[1] for match in _PLACE.finditer(text)]


def fill(text: str, runs: Mapping[str, Run]) -> str:
    """A page with the figures of the newest runs.

    Args:
        text: the present page.
        runs: the newest run of each subject.

    Raises:
        LookupError: if a place has an unknown name, or a figure is not in the newest run.
    """
    known = {name: quote.figure(runs) for name, quote in FIGURES.items()}
    words = {f"{subject}_run": _Words(run) for subject, run in runs.items()}

    def written(match: re.Match[str]) -> str:
        said = QUOTES[match[1]].strip().format_map(known | words)
        parts = said.split("\n\n")
        wrapped = "\n\n".join(
            one if one.startswith("|") else textwrap.fill(one, _WIDTH, break_on_hyphens=False)
            for one in parts
        )
        return f"<!-- begin figures {match[1]} -->\n\n{wrapped}\n\n<!-- end figures {match[1]} -->"

    return _PLACE.sub(written, text)


# ----------------------------------------------------------------------------------------------- figures

_1, _25, _49 = (f"{n} iterations after the checkpoint" for n in (1, 25, 49))
_BACK = "kill to the end of the next new iteration, 25 after the checkpoint"
_STEP = "step / plain PyTorch's, 25 after the checkpoint"
_MEMORY = "a worker's most memory, 25 after the checkpoint"
_ALL_LIVE = "to all live, interrupted iteration begins"


def _beside(table: int, system: str) -> Quote:
    """When training goes on, from the side by side.

    Args:
        table: its number, from 1: three kinds of losses of replicas, of a pipeline, and of HSDP.
        system: whose.
    """
    return Quote("peers", _BACK, (system,), (table,))


FIGURES = {
    # Recovery of a pipeline
    "detected": Quote("recovery", "kill to detected", (_1, _25, _49), spread=True),
    "live": Quote("recovery", "kill to live without the replay", (_1, _25, _49)),
    "live_spread": Quote("recovery", "kill to live without the replay", (_1, _25, _49), spread=True),
    "live_helped": Quote("recovery", "kill to live without the replay", (_1, _25, _49), (2,)),
    "replay": Quote("recovery", "replay / pure compute", (_25, _49)),
    "replay_spread": Quote("recovery", "replay / pure compute", (_25, _49), spread=True),
    "back": Quote("recovery", _ALL_LIVE, (_25,)),
    "back_helped": Quote("recovery", "with helpers: kill to all live", (_25,)),
    "back_torchrun": Quote("recovery", "torchrun + DCP, until in the same iteration again", (_25,)),
    "faster": Quote("recovery", "torchrun + DCP / swift_ft", (_25,)),
    "faster_helped": Quote("recovery", "torchrun + DCP / swift_ft", (_25,), (2,)),
    "faster_49": Quote("recovery", "torchrun + DCP / swift_ft", (_49,)),
    "faster_helped_49": Quote("recovery", "torchrun + DCP / swift_ft", (_49,), (2,)),
    "one_helper": Quote("parallel-recovery", "replay / with alone", ("1 helper",)),
    # Beside other systems
    "replicas": _beside(1, "swift_ft"),
    "replicas_torchrun": _beside(1, "torchrun + DCP"),
    "replicas_torchft_fast": _beside(1, "torchft, timeouts of 1 s"),
    "replicas_nvidia": _beside(1, "nvidia-resiliency-ext"),
    "alone": _beside(2, "swift_ft"),
    "alone_guest": _beside(2, "swift_ft, a guest"),
    "alone_torchrun": _beside(2, "torchrun + DCP"),
    "alone_torchft": _beside(2, "torchft"),
    "alone_torchft_fast": _beside(2, "torchft, timeouts of 1 s"),
    "alone_nvidia": _beside(2, "nvidia-resiliency-ext"),
    "alone_dlrover": _beside(2, "dlrover"),
    "stages": _beside(4, "swift_ft"),
    "stages_torchrun": _beside(4, "torchrun + DCP"),
    "stages_nvidia": _beside(4, "nvidia-resiliency-ext"),
    "shards": _beside(7, "swift_ft"),
    "shards_torchrun": _beside(7, "torchrun + DCP"),
    "step": Quote("peers", _STEP, ("swift_ft",), tuple(range(1, 10))),
    "step_replicas": Quote("peers", _STEP, ("swift_ft",), (1, 2, 3)),
    "step_stages": Quote("peers", _STEP, ("swift_ft",), (4, 5, 6)),
    "step_shards": Quote("peers", _STEP, ("swift_ft",), (7, 8, 9)),
    "step_torchrun": Quote("peers", _STEP, ("torchrun + DCP",), tuple(range(1, 10))),
    "memory": Quote("peers", _MEMORY, ("swift_ft",), tuple(range(1, 10))),
    "memory_torchrun": Quote("peers", _MEMORY, ("torchrun + DCP",), tuple(range(1, 10))),
    # DDP
    "ddp_short": Quote("ddp-step", "torchrun", ("step",), (1, 2, 3)),
    "ddp_short_cpu": Quote("ddp-step", "torchrun", ("CPU time of worker 0",), (1, 2, 3)),
    # Imports
    "imports": Quote("imports", "as it comes", ("kill to all reported",)),
    "preloaded": Quote("imports", "--preload datasets,transformers.trainer", ("kill to all reported",)),
    # The price of a step
    "overhead": Quote("overhead", "everything: logged / plain", ("a run's mean iteration",)),
    "overhead_cpu": Quote("overhead", "everything: logged / plain", ("CPU time of all processes",)),
    "digests": Quote("proof", "BatchNorm", ("ratio, every 100",)),
    "undo": Quote("undo", "20M adamw foreach: undo / foreach step"),
    "wrapped_sgd": Quote("undo", "20M sgd fused: step / plain step"),
    "exact": Quote("undo", "20M adamw foreach: exact step / plain step"),
    "exact_fused": Quote("undo", "20M adamw fused: exact step / plain step"),
    "compiled": Quote("undo", "20M adamw foreach: compiled step / plain step"),
    "compiled_fused": Quote("undo", "20M adamw fused: compiled step / plain step"),
    # The log
    "packed_float32": Quote("packing", "float32", ("ratio",), tuple(range(1, 11))),
    "packed_bfloat16": Quote("packing", "bfloat16", ("ratio",), tuple(range(1, 11))),
    "s3_writer": Quote("log-throughput", "s3", ("MB/s",), (2,)),
    "s3_ratio": Quote("log-throughput", "s3: writer / raw write"),
    # Fewer machines
    "left": Quote("loss-beside-torchft", "layers have moved, too", ("speed left",)),
    "left_torchft": Quote("loss-beside-torchft", "torchft 0.2.0", ("speed left",)),
    # Planning
    "greedy": Quote("grouping", "greedy"),
    "greedy_above": Quote("grouping", "10000", ("greedy above it",), (1, 2, 3, 4, 5)),
    "equal_boundaries": Quote("grouping", "10000", ("optimal",), (1, 2)),
    "random_boundaries": Quote("grouping", "10000", ("optimal",), (3,)),
    "within_1_percent": Quote("grouping", "10000", ("optimal",), (4,)),
    "exactly_alike": Quote("grouping", "10000", ("optimal",), (5,)),
    "oobleck_hours": Quote("oobleck", "one loss in 6 h or 1 h"),
    "oobleck_minutes": Quote("oobleck", "one loss in 10 min"),
    "oobleck_third": Quote("oobleck", "Oobleck: one loss in 1 h, from the other two cells, 5 models"),
    "varuna_third": Quote("oobleck", "Varuna: one loss in 1 h, from the other two cells, 4 models"),
    "half_slices": Quote("large-change", "half the slices, twice the replicas", ("NVLink 4, 8 NDR, s",)),
    "half_stages": Quote("large-change", "half the stages, twice the replicas", ("NVLink 4, 8 NDR, s",)),
    "half_stages_one": Quote("large-change", "half the stages, twice the replicas", ("PCIe 4, 1 HDR, s",)),
    "large_change": Quote("large-change", "slowest change over NVLink and InfiniBand, of DynaTrain's 2 s"),
    "large_change_hdr": Quote("large-change", "the same, NVLink 3, 8 HDR"),
    "autohet_a": Quote("autohet", "A", ("faster than Varuna, by published rates",)),
    "autohet_b": Quote("autohet", "B", ("faster than Varuna, by published rates",)),
    "autohet_c": Quote("autohet", "C", ("faster than Varuna, by published rates",)),
    "tenplex_stages": Quote("tenplex", "figure 14: twice the stages", ("of the state",)),
    "tenplex_ranks": Quote("tenplex", "figure 14: twice the stages", ("ranks in order",)),
    "tenplex_lost": Quote("tenplex", "figure 11: 4 of 16 devices lost", ("ranks in order",)),
    "grouping_memory": Quote("grouping", "memory, of all chains"),
}

# ------------------------------------------------------------------------------------------------- texts

QUOTES = {
    "readme": """
| [beside others](docs/peers.md): seconds until training goes on | swift_ft | torchrun + DCP | others |
| --- | --- | --- | --- |
| four replicas, a spare waits | {replicas:.2f} | {replicas_torchrun:.1f} | torchft \
{replicas_torchft_fast:.1f} (timeouts of 1 s), nvidia-resiliency-ext {replicas_nvidia:.1f} |
| four replicas, no spare: the machine comes back at once | {alone:.1f}; {alone_guest:.2f} if a surviving \
machine takes over its worker (`--elastic-wait 0`) | {alone_torchrun:.1f} | torchft {alone_torchft:.0f}, or \
{alone_torchft_fast:.1f} (timeouts of 1 s); nvidia-resiliency-ext {alone_nvidia:.1f}; dlrover \
{alone_dlrover:.1f} |
| a pipeline of four, a spare waits | {stages:.1f} | {stages_torchrun:.1f} | nvidia-resiliency-ext \
{stages_nvidia:.1f} |
| HSDP, a spare waits | {shards:.2f} | {shards_torchrun:.1f} | |
| a step without a failure / plain PyTorch's | {step.low:.2f} to {step.high:.2f} (the goal was 1.01) | \
{step_torchrun.low:.2f} to {step_torchrun.high:.2f} | |

The checkpoint is 25 short iterations old ({peers_run.runs}, {peers_run.run.date}); torchrun and
nvidia-resiliency-ext repeat these.
""",
    "slower": """
An iteration of half a second with the session and its log took {overhead:.2f} times as long as one of plain
torchrun ({overhead_run.runs}), and {overhead_cpu:.2f} times its CPU time; with DDP {ddp_short.low:.2f} to
{ddp_short.high:.2f} times ({ddp_short_cpu.low:.2f} to {ddp_short_cpu.high:.2f} times its CPU time). Short
steps pay more, since the work of a session in a step does not depend on its length: where four workers share
two cores, and a step of plain PyTorch takes 76 to 156 ms, it took {step_replicas.low:.2f} to
{step_replicas.high:.2f} times as long with DDP, {step_stages.low:.2f} to {step_stages.high:.2f} times in a
pipeline, and {step_shards.low:.2f} to {step_shards.high:.2f} times with HSDP, whose optimizer is wrapped with
`exact=True` there ([beside others](peers.md)). Digests at each checkpoint boundary cost below 1 % of the CPU
time at `checkpoint_every=100` ({digests:.4f} times at most). `wrap_optimizer(..., exact=True)` has a price of
its own: {exact:.1f} times the plain step for AdamW with foreach, {exact_fused:.1f} times for fused AdamW
({compiled:.1f} and {compiled_fused:.1f} with `exact="compiled"`). Without `exact`, a wrapped step takes as
long as the plain one, but for fused SGD, {wrapped_sgd:.2f} times.
""",
    "recovery": """
A killed worker is noticed after {detected.low:.2f} to {detected.high:.2f} s. In a pipeline, all are live
again {live_spread.low:.2f} to {live_spread.high:.2f} s after the kill (medians {live.low:.2f} to
{live.high:.2f} s, with helpers {live_helped.low:.2f} to {live_helped.high:.2f} s), plus the replay, which
takes as long as the lost stage's computation since the checkpoint ({replay_spread.low:.2f} to
{replay_spread.high:.2f} times, medians {replay.low:.2f} to {replay.high:.2f}), or with one helper
{one_helper:.2f} of that ({parallel-recovery_run.runs}). In all: {back:.1f} s
({back_helped:.1f} s with helpers) where 25 iterations are replayed, and {back_torchrun:.1f} s with torchrun
and a DCP checkpoint ({recovery_run.runs}), which is {faster:.1f} and {faster_helped:.1f} times as long. After
49 iterations it is {faster_49:.1f} and {faster_helped_49:.1f} times (the goal was 5). With DDP, a spare and
another, smaller model ([beside others](peers.md)) the next new iteration was complete {replicas:.2f} s after
the kill ({peers_run.runs}). What your script imports comes on top, unless you name it: with datasets and
transformers {imports:.1f} s until the replacement reports, and {preloaded:.2f} s with
[`--preload`](#do-i-need-spares) ({imports_run.runs}).
""",
    "memory": """
| what | memory |
| --- | --- |
| a worker with a session, small models | {memory.low:.0f} to {memory.high:.0f} MiB at most, where \
torchrun's took {memory_torchrun.low:.0f} to {memory_torchrun.high:.0f} ([beside others](peers.md)). \
Pages that it shares with the process that it was forked from count |
| the log of a pipeline | 256 MiB for each machine (`log_budget_bytes`) |
| memory checkpoints (`snapshot_every`) | [four times](concepts.md#memory-checkpoints) each worker's \
state, on the host |
| a guest; the next world of a change | 1.2 times what the machine's workers take, on the host and on \
each GPU. The state lies on the host once more while a world is switched |
| `exact=True` | [copies of what is small; of the rest, a bucket and some bytes for each \
element](undo.md#costs) |
| `verify="replay"` | a copy of the state on the device, in a step that is computed twice |
""",
    "packing": """
Packing (`compress=`) makes messages {packed_float32.low:.1f} to {packed_float32.high:.1f} times smaller
for float32, {packed_bfloat16.low:.1f} to {packed_bfloat16.high:.1f} times for bfloat16.
""",
    "s3": """
There is no measurement of real S3: the tests run against SeaweedFS, where the log was written at
{s3_writer:.0f} MB/s, {s3_ratio:.2f} times the speed of plain uploads ({s3_ratio.low:.2f} to
{s3_ratio.high:.2f}).
""",
    "from-torchrun": """
Measured 25 iterations after the checkpoint: in a pipeline {back:.1f} s instead of {back_torchrun:.1f} s, or
{back_helped:.1f} s with helpers ({recovery_run.runs}); with a smaller model ([beside others](peers.md)) and a
spare {stages:.1f} s instead of {stages_torchrun:.1f} s in a pipeline, and {replicas:.2f} s instead of
{replicas_torchrun:.1f} s for four DDP workers ({peers_run.runs}).
""",
    "from-torchft": """
Measured for four DDP workers ([beside others](peers.md); {peers_run.runs}), from the kill to the end of the
next new iteration: {replicas:.2f} s with a spare, where torchft 0.2 with all its timeouts at 1 s took
{replicas_torchft_fast:.2f} s. Without a spare {alone:.2f} s, or {alone_guest:.2f} s with a guest at once, and
torchft {alone_torchft_fast:.2f} s with these timeouts, {alone_torchft:.0f} s by default (once). Its gloo hook
had to be patched.
""",
    "speed-left": """
Of six machines in two pipelines, five kept {left:.2f} of the speed, and {left_torchft:.2f} with torchft
({loss-beside-torchft_run.runs}; 5/6 is 0.83, and a pipeline of fewer stages has smaller bubbles).
""",
    "undo": """
In the newest run (AdamW, 20 million parameters, two threads; {undo_run.runs}), an exact step takes
{exact_fused:.1f} times as long as a fused one, and {compiled_fused:.1f} times with `exact="compiled"`;
{exact:.1f} and {compiled:.1f} times as long as one with foreach. An undo takes {undo:.2f} of a foreach
step.
""",
    "oobleck": """
Oobleck's Table 2 (30 nodes become 15, one lost every 6 h, 1 h or 10 min) comes out within
{oobleck_hours:.2f} % for 6 h and 1 h, and within {oobleck_minutes:.2f} % for 10 min, from its throughput
by number of nodes and its seconds per change (`benchmarks/planning/elastic.py`). For the other three
models neither is published. There, two cells of a row give the mean throughput and the cost of a loss, and
the third follows: within {oobleck_third:.2f} % for Oobleck and all five models, within
{varuna_third:.2f} % for Varuna and four. With GPT-3 6.7b Varuna restarts for longer than the ten minutes
between two losses, and its cells say no more.
""",
    "large-change": """
LLaMA 70B on 64 devices (988 GB of state, `benchmarks/planning/links.py`): half the slices for twice the
replicas take at least {half_slices:.2f} s over NVLink 4, half the stages for twice the replicas
{half_stages:.2f} s over eight adapters of 400 Gbit/s, or {half_stages_one:.1f} s over one of 200. With NVLink
4 and 400 Gbit/s per device the slowest of eight changes takes {large_change:.2f} of the 2 s that DynaTrain
(arXiv 2605.18815) measures for a model of this size, with NVLink 3 and 200 Gbit/s {large_change_hdr:.2f}.
""",
    "published-changes": """
Tenplex's changes move {tenplex_stages:.2f} of the state of GPT-3 6.7B for twice the stages, where ranks in
order would move {tenplex_ranks:.2f}. They move nothing after the loss of 4 of 16 devices, where ranks in
order would move {tenplex_lost:.2f} (`benchmarks/planning/tenplex.py`). Of AutoHet's recoveries, A and C need
nothing from the cloud. With the rates that it publishes they would be {autohet_a:.2f}, {autohet_b:.2f} and
{autohet_c:.2f} times as fast as Varuna's; published are 4.38, 1.49 and 3.59
(`benchmarks/planning/autohet.py`).
""",
    "grouping": """
`benchmarks/planning/grouping.py` measures it (CPU seconds of one thread; budgets of 1 to 90 % of a full
log, with and without parallel recovery). For 10,000 machines: greedy up to {greedy:.2f} s; optimal
{equal_boundaries.low:.1f} to {equal_boundaries.high:.1f} s with equal boundaries,
{random_boundaries.low:.1f} to {random_boundaries.high:.1f} s with random computation and boundaries, up
to {within_1_percent.high:.1f} s where computation is alike within 1 % and boundaries are random, up to
{exactly_alike.high:.1f} s where it is exactly alike. All of these were proven. Memory stayed below
{grouping_memory:.1f} GB. At worst, greedy was {greedy_above.low:.0f} to {greedy_above.high:.0f} % above
the optimum.
""",
}
"""Texts by the name of their place. Lines are joined and wrapped anew, but for tables."""
