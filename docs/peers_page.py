"""Write docs/peers.md: the newest side by side in five tables, from one recorded run.

The run has a table of ten columns for each layout and each kind of loss. A reader asks of it: how long until
training goes on, and with all workers, what is lost, what it costs while nothing fails, and where another
system is ahead. ``docs.results`` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from benchmarks.lib.figures import Cell, Figure
from benchmarks.lib.markdown import table, table_in_markdown
from benchmarks.lib.runs import Run, Table
from benchmarks.peers.report import (
    CPU,
    FAILURES,
    FULL,
    LAYOUTS,
    MEMORY,
    NEW,
    PRICE,
    REPEATED,
    SHORT,
    STEP,
    WEIGHTS,
)
from benchmarks.peers.systems import OURS, SWIFT

_AFTER = " after the checkpoint"
_COSTS = (STEP, CPU, PRICE, MEMORY)
_PAGE = """\
# Beside other systems

The same training on the same machine, in turns, under swift_ft and under others that go on after a failure:
[torchft](https://github.com/meta-pytorch/torchft), torchrun with checkpoints of
`torch.distributed.checkpoint`, [nvidia-resiliency-ext](https://github.com/NVIDIA/nvidia-resiliency-ext) and
[DLRover](https://github.com/intelligent-machine-learning/dlrover). `make bench-peers` measures it on yours;
[how their terms and ours go together](migration.md). swift_ft is there in three ways: as it is, with
[a guest](how-to/elastic.md) at once where no spare waits, and going on with three replicas, as torchft does.

Four machines of one host, on which two cores are shared by all processes, train a small GPT over gloo.
Medians; (1) is one run alone. The checkpoint is {distance} iterations older than the loss.
torchft and nvidia-resiliency-ext are made for NCCL, and are used on many GPUs; swift_ft ran over NCCL for
minutes, on one GPU ([NCCL](nccl.md)).

## Until training goes on

Seconds from the kill to the end of the next new iteration.

![Seconds from the kill to the next new iteration, by system](../benchmarks/figures/peers.png)

{back}

*As swift_ft*: the setting plays no part there. *Failed*, *cannot*, *not measured*:
[HISTORY](../benchmarks/HISTORY.md#{name}) says why, in the same place of its tables.

## Until all four workers train

Seconds from the kill to the end of the next new iteration of all four. *Never*: the job goes on with three.

{full}

## What is lost

Completed iterations that all repeat, and whether the weights at the end are those of an undisturbed run, bit
for bit.

{lost}

## What it costs while nothing fails

Of several kinds of losses, which play no part here, the least and the greatest median. The targets that were
missed, which count the worst repetition: [RESULTS](../benchmarks/RESULTS.md#figures).

{costs}

## Where another system is ahead

First swift_ft as it is, then the best of the others.

{worse}

## How it was measured

{where}

{about}

{settings}

[HISTORY](../benchmarks/HISTORY.md#{name}) has all of it with its ranges, what does not run
on this host, and earlier runs;
`python -m benchmarks.peers.draw` draws the picture.
"""


@dataclass(frozen=True, slots=True)
class Loss:
    """A layout and what was lost, with the run's table of it.

    Attributes:
        layout: in words.
        failure: in words.
        short: the same in two.
        figures: by row and system.
    """

    layout: str
    failure: str
    short: str
    figures: dict[str, dict[str, Cell]]

    def of(self, row: str, system: str) -> Cell:
        """What stands there."""
        return self.figures.get(row, {}).get(system)

    def number(self, row: str, system: str) -> Figure | None:
        """The same if it is a figure."""
        cell = self.of(row, system)
        return cell if isinstance(cell, Figure) and cell.value is not None else None


def losses(run: Run, distance: int) -> list[Loss]:
    """All tables of a side by side.

    Args:
        run: one that is recorded.
        distance: iterations between the checkpoint and the loss.
    """
    titles = {
        f"**{name[0].upper()}{name[1:]}; {words}**": (name, words, SHORT[failure])
        for name in LAYOUTS.values()
        for failure, words in FAILURES.items()
    }
    return [Loss(*titles[one.text], _rows(one, distance)) for one in run.tables if one.text in titles]


def _rows(found: Table, distance: int) -> dict[str, dict[str, Cell]]:
    at = f", {distance}{_AFTER}"
    return {
        str(row[0]).removesuffix(at): dict(zip(found.columns[1:], row[1:], strict=True))
        for row in found.rows
        if str(row[0]).endswith(at)
    }


def page(run: Run, where: str, distance: int = 25) -> str:
    """The page.

    Args:
        run: the newest side by side.
        where: the machine and the command, in words.
        distance: as in :func:`losses`.
    """
    found = losses(run, distance)
    systems = list(found[0].figures[NEW])
    return _PAGE.format(
        distance=distance,
        name=run.name,
        where=f"{where[0].upper()}{where[1:]}",
        about=run.about,
        back=_by_loss(found, systems, _back),
        full=_by_loss(found, systems, _full),
        lost=_by_loss(found, systems, _lost),
        costs=table(["", *systems], list(_costs(found, systems))),
        worse=table(["", *SHORT.values()], list(_worse(found, systems))),
        settings="\n\n".join(table_in_markdown(one) for one in run.tables if not one.text),
    )


# ---------------------------------------------------------------------------------------------- tables


def _by_loss(found: Sequence[Loss], systems: Sequence[str], cell: Callable[[Loss, str], str]) -> str:
    """A row for each loss, a column for each system."""
    rows = [[f"{one.layout}, {one.short}", *(cell(one, name) for name in systems)] for one in found]
    return table(["", *systems], rows)


def _back(loss: Loss, system: str) -> str:
    back = loss.number(NEW, system)
    return _none(loss, system) if back is None else _median(back)


def _full(loss: Loss, system: str) -> str:
    full = loss.of(FULL, system)
    return _median(full) if isinstance(full, Figure) else full or _none(loss, system)


def _none(loss: Loss, system: str) -> str:
    """In two words why there is no figure: what the run says before its reason."""
    why = str(loss.of(NEW, system) or "").partition(":")[0]
    return {"no": "cannot", "fails": "failed"}.get(why, why)


def _lost(loss: Loss, system: str) -> str:
    repeated, equal = loss.number(REPEATED, system), loss.of(WEIGHTS, system)
    if repeated is None:
        return _none(loss, system)
    bits = {"yes": "same bits", "no": "others"}.get(str(equal), str(equal))
    return f"{repeated:.0f}; {bits}"


def _median(figure: Figure, unit: bool = False) -> str:
    """``0.29``, and ``0.29 (1)`` if there was one run."""
    said = replace(figure, low=None, high=None, unit=figure.unit if unit else "").text()
    return said if figure.low is not None else f"{said} (1)"


def _costs(found: Sequence[Loss], systems: Sequence[str]) -> Iterator[list[str]]:
    for layout, same in groupby(found, attrgetter("layout")):
        tables = list(same)
        for row in _COSTS:
            cells = ([one.number(row, name) for one in tables] for name in systems)
            yield [f"{layout}: {row}", *(_between([one for one in some if one]) for some in cells)]


def _between(figures: Sequence[Figure]) -> str:
    """The least and the greatest median, or what there is."""
    values = [one.value for one in figures if one.value is not None]
    if not values:
        return ""
    first = figures[0]
    low, high = (
        replace(first, value=end, low=None, high=None, unit="") for end in (min(values), max(values))
    )
    unit = f" {first.unit}".rstrip()
    return f"{low.text()}{unit}" if low.text() == high.text() else f"{low.text()} to {high.text()}{unit}"


def _worse(found: Sequence[Loss], systems: Sequence[str]) -> Iterator[list[str]]:
    """For each layout and figure in which another system is ahead, by how much it is after each loss."""
    others = [name for name in systems if name not in OURS]
    rows = [row for row in found[0].figures if row != WEIGHTS]
    for layout, same in groupby(found, attrgetter("layout")):
        by_short = {one.short: one for one in same}
        for row in rows:
            cells = [
                _ahead(by_short[short], row, others) if short in by_short else "" for short in SHORT.values()
            ]
            if any(cells):
                yield [f"{layout}: {row}", *cells]


def _ahead(loss: Loss, row: str, others: Sequence[str]) -> str:
    """``3.30 s, torchft 1.07 s``; empty where swift_ft is the best or as good as it."""
    ours = loss.number(row, SWIFT.name)
    known = {name: figure for name in others if (figure := loss.number(row, name))}
    if ours is None or not known:
        return ""
    best = min(known, key=lambda name: known[name].value or 0.0)
    mine, theirs = _median(ours, unit=True), _median(known[best], unit=True)
    return (
        f"{mine}, {best} {theirs}"
        if (known[best].value or 0.0) < (ours.value or 0.0) and mine != theirs
        else ""
    )
