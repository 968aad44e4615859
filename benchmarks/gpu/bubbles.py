"""The cost of logging messages for a stage on a GPU, and whether the copies fit into its bubbles.

A stage is simulated: it waits for a message, computes (matrix products), and sends one, in a loop, as the
middle stage of a pipeline does; half of the messages are received and only their checksums logged, but they
are copied, too. The wait is a chosen share of the iteration. In turns it runs with

    off           nothing is logged
    in bubbles    MessageLog: copies on a side stream, begun when the stage waits
    synchronous   every message is copied by `.cpu()` at once, and then logged

Copied messages are released at once, so that the copy to the host is measured and no disk; with `--store` the
log's writer writes them. Several workers are separate processes that share the GPU, and the time of the
slowest one is reported. Without a GPU nothing is measured, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from queue import Empty
from typing import Any

import torch

from benchmarks.gpu.part import figure
from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    machine,
    record,
    table,
    target_table,
)
from examples.commands import CommandError
from swift_ft.logging import (
    Direction,
    IterationStats,
    LogBudget,
    LogOptions,
    LogStats,
    LogWriter,
    MessageKey,
    MessageLog,
    SegmentIdentity,
)
from swift_ft.storage.store import Store

MODES = ("off", "in bubbles", "synchronous")
LIMIT = 1.01
FITS = 0.9
"""The log fits the bubbles where this share of the copies' time is inside; an iteration's last one is not."""
MATRIX = 2048
WARM_UP = 3
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Case:
    """What a stage sends, and how long it waits."""

    message_mib: int
    bubble_share: float

    @property
    def bytes(self) -> int:
        """Of one message."""
        return self.message_mib << 20


@dataclass(frozen=True)
class Sample:
    """One worker's run of some iterations.

    Attributes:
        iteration_s: mean.
        stats: of one iteration, on average; of the pool the most.
    """

    iteration_s: float
    stats: IterationStats


@dataclass(frozen=True)
class Result:
    """All runs of a case, by mode: per repetition one sample of each worker."""

    case: Case
    samples: dict[str, list[list[Sample]]]

    def iteration_s(self, mode: str) -> list[float]:
        """The slowest worker's, per repetition."""
        return [max(one.iteration_s for one in workers) for workers in self.samples[mode]]

    def ratio(self, mode: str) -> Summary:
        """To the same repetition's run without logging."""
        pairs = zip(self.iteration_s(mode), self.iteration_s("off"), strict=True)
        return Summary.of([ours / plain for ours, plain in pairs])

    def of_stats(self, measure: Callable[[IterationStats], float]) -> Summary:
        """A number from the accounts of the copies in bubbles, all workers' and repetitions'."""
        return Summary.of([measure(one.stats) for workers in self.samples["in bubbles"] for one in workers])

    def inside(self) -> Summary:
        """The share of the copies' time that is inside of bubbles."""
        return self.of_stats(lambda a: a.copied_in_bubbles_s / max(_copied_s(a), 1e-12))

    def gb_per_s(self, slots: int) -> Summary:
        """While a copy runs."""
        return self.of_stats(lambda a: 2 * slots * self.case.bytes / 1e9 / max(_copied_s(a), 1e-12))


def _copied_s(stats: IterationStats) -> float:
    return stats.copied_in_bubbles_s + stats.copied_outside_s


def main() -> int:
    """Measures all cases and prints the report."""
    args = _arguments()
    if args.small:
        print("bubbles.py: streams of a GPU are what it measures, and a CPU has none: not tried")
        return 0
    if not torch.cuda.is_available():
        print("bubbles.py: no CUDA device, nothing can be measured", file=sys.stderr)
        return 2
    results = measure(args)
    targets = judge(results)
    body = report(results, targets, args)
    if args.record:
        record("gpu-logging", body, args)
    if args.figures:
        return 0
    print(json.dumps(as_json(results, targets), indent=1) if args.json else body)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, repetitions=7)
    parser.add_argument("--message-mib", nargs="+", type=int, default=[1, 8, 32], help="default: %(default)s")
    parser.add_argument(
        "--bubble-share",
        nargs="+",
        type=float,
        default=[0.1, 0.3],
        help="of an iteration, default: %(default)s",
    )
    parser.add_argument("--slots", type=int, default=16, help="messages sent per iteration: %(default)s")
    parser.add_argument("--compute-ms", type=float, default=4.0, help="before each, default: %(default)s")
    parser.add_argument("--iterations", type=int, default=20, help="per run, default: %(default)s")
    parser.add_argument("--budget-mib", type=int, default=2048, help="of memory, default: %(default)s")
    parser.add_argument("--workers", type=int, default=1, help="that share the GPU, default: %(default)s")
    parser.add_argument("--small", action="store_true", help="says that a CPU can try nothing of it")
    parser.add_argument(
        "--figures", action="store_true", help="print figures as lines of JSON, and no report"
    )
    parser.add_argument("--store", help="path or URL to write the log to; default: nothing is written")
    return parser.parse_args()


# ----------------------------------------------------------------------------------------------- measuring


def measure(args: argparse.Namespace) -> list[Result]:
    """All cases, each worker in a separate process; they begin every run together."""
    context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
    barrier = context.Barrier(args.workers)
    queues = [context.Queue() for _ in range(args.workers)]
    workers = [
        context.Process(target=_work, args=(rank, args, barrier, queues[rank]), daemon=True)
        for rank in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    results = []
    for case in _cases(args):
        samples: dict[str, list[list[Sample]]] = {mode: [] for mode in MODES}
        for repetition in range(args.repetitions):
            for mode in _order(repetition):
                samples[mode].append([_next_sample(*pair) for pair in zip(queues, workers, strict=True)])
        results.append(Result(case, samples))
        ratio = results[-1].ratio("in bubbles").text("")
        what = f"{case.message_mib} MiB, {case.bubble_share:.0%} bubbles"
        print(f"# {what}: in bubbles / off {ratio}", file=sys.stderr, flush=True)
        for found in _figures(results[-1]) if args.figures else ():
            print(json.dumps(found.to_dict()), flush=True)
    for worker in workers:
        worker.join()
    return results


def _next_sample(queue: Any, worker: Any) -> Sample:
    while True:
        try:
            sample: Sample = queue.get(timeout=1.0)
        except Empty:
            if not worker.is_alive():
                raise CommandError(f"a worker ended with {worker.exitcode}") from None
        else:
            return sample


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for message_mib in args.message_mib:
        for share in args.bubble_share:
            yield Case(message_mib, share)


def _order(repetition: int) -> tuple[str, ...]:
    first = repetition % len(MODES)
    return MODES[first:] + MODES[:first]


def _work(rank: int, args: argparse.Namespace, barrier: Any, queue: Any) -> None:
    for case in _cases(args):
        stage = Stage(case, args.slots, args.compute_ms)
        logs = {mode: _log(f"{case.message_mib}-{case.bubble_share}-{mode}", rank, args) for mode in MODES}
        for mode in MODES:
            run(stage, mode, *logs[mode], WARM_UP, barrier)
        for repetition in range(args.repetitions):
            for mode in _order(repetition):
                queue.put(run(stage, mode, *logs[mode], args.iterations, barrier))
        for log, _ in logs.values():
            assert log.writer is not None
            log.writer.close(DEADLINE_S)


def run(stage: Stage, mode: str, log: MessageLog, stats: LogStats, iterations: int, barrier: Any) -> Sample:
    """Some iterations in one of the modes."""
    before = stats.total
    barrier.wait(DEADLINE_S)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(iterations):
        stage.iterate(mode, log)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    log.drain(DEADLINE_S)
    log.end_iteration()
    if log.writer is not None:
        log.writer.drop_before(stage.iteration)
    return Sample(seconds / iterations, _difference(stats.total, before, iterations))


def _difference(after: IterationStats, before: IterationStats, iterations: int) -> IterationStats:
    return IterationStats(
        bubble_s=(after.bubble_s - before.bubble_s) / iterations,
        copied_in_bubbles_s=(after.copied_in_bubbles_s - before.copied_in_bubbles_s) / iterations,
        copied_outside_s=(after.copied_outside_s - before.copied_outside_s) / iterations,
        held_back_s=(after.held_back_s - before.held_back_s) / iterations,
        pool_high_water_bytes=after.pool_high_water_bytes,
    )


def _log(name: str, rank: int, args: argparse.Namespace) -> tuple[MessageLog, LogStats]:
    options, stats = LogOptions(LogBudget(args.budget_mib << 20)), LogStats()
    log = MessageLog(options, stats)
    log.writer = Nowhere()  # type: ignore[assignment]  # what MessageLog asks of a writer
    if args.store:
        identity = SegmentIdentity("bench", rank, 0)
        directory = f"{name.replace(' ', '-')}/rank-{rank}"
        log.writer = LogWriter(Store(args.store), directory, identity, options, stats=stats, lazy=True)
    return log, stats


class Nowhere:
    """A writer that writes nothing."""

    def append_message(
        self, key: MessageKey, tensor: torch.Tensor, release: Callable[[], None] | None = None
    ) -> None:
        """Gives the buffer back at once."""
        if release is not None:
            release()

    append_received = append_message

    def append_receipt(self, *_: object) -> None:
        """Nothing to release."""

    def wake(self, *_: object) -> None:
        """Nothing to write."""

    def drop_before(self, iteration: int) -> None:
        """Nothing was written."""

    def close(self, timeout_s: float) -> None:
        """Nothing is open."""


# ----------------------------------------------------------------------------------------------- the stage


class Stage:
    """Waits, computes and sends on the current GPU, as a schedule has a stage do.

    Args:
        case: what it sends, and how long it waits.
        slots: messages sent, and as many received, per iteration.
        compute_ms: of computation before each message that is sent.
    """

    def __init__(self, case: Case, slots: int, compute_ms: float) -> None:
        self.iteration = 0
        self._slots = slots
        self._a = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.float16) / MATRIX**0.5
        self._product = torch.empty_like(self._a)
        self._elements = case.bytes // 2
        self._source = torch.zeros(self._elements, device="cuda", dtype=torch.float16)
        self._buffers = [torch.zeros_like(self._source) for _ in range(slots)]
        self._link = torch.cuda.Stream()
        one = _device_ms(lambda: torch.mm(self._a, self._a, out=self._product))
        self._products = max(1, round(compute_ms / one))
        cycles = 10_000_000
        wait_ms = compute_ms * case.bubble_share / (1 - case.bubble_share)
        self._cycles = int(cycles * wait_ms / _device_ms(lambda: torch.cuda._sleep(cycles)))

    def iterate(self, mode: str, log: MessageLog) -> None:
        """One iteration."""
        for slot in range(self._slots):
            self._receive(slot, mode, log)
            for _ in range(self._products):
                torch.mm(self._a, self._a, out=self._product)
            message = self._source + 1.0  # new memory each time, as an activation has
            self._log_sent(slot, mode, log, message)
        self.iteration += 1
        log.end_iteration()

    def _receive(self, slot: int, mode: str, log: MessageLog) -> None:
        """Receives on a separate stream: the message arrives some time after this stage is ready for it."""
        buffer, compute = self._buffers[slot], torch.cuda.current_stream()
        if mode == "in bubbles":
            log.overwriting(buffer)
        self._link.wait_stream(compute)
        with torch.cuda.stream(self._link):
            torch.cuda._sleep(self._cycles)
        if mode == "in bubbles":
            log.bubble_begins()
        compute.wait_stream(self._link)
        if mode == "in bubbles":
            log.bubble_ends()
            log.received(self._key(slot, Direction.BACKWARD), buffer)
        elif mode == "synchronous":
            log.received(self._key(slot, Direction.BACKWARD), buffer.cpu())

    def _log_sent(self, slot: int, mode: str, log: MessageLog, message: torch.Tensor) -> None:
        key = self._key(slot, Direction.FORWARD)
        if mode == "in bubbles":
            log.sent(key, message)
        elif mode == "synchronous":
            log.sent(key, message.cpu())

    def _key(self, slot: int, direction: Direction) -> MessageKey:
        return MessageKey(self.iteration, slot, direction, 1, 2, 0)


def _device_ms(action: Callable[[], object], times: int = 20) -> float:
    """Of the device's time, once it is warm."""
    for _ in range(3):
        action()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times


# ------------------------------------------------------------------------------------------------- results


def judge(results: list[Result]) -> list[Target]:
    """What was asked for, where the log fits the bubbles."""
    found = []
    for result in results:
        ratio, inside = result.ratio("in bubbles"), result.inside().median
        if inside >= FITS:
            name = f"logging on / off, {result.case.message_mib} MiB, {result.case.bubble_share:.0%} bubbles"
            found.append(Target(name, f"<= {LIMIT}", ratio.text(""), ratio.median <= LIMIT))
    return found


def _figures(result: Result) -> list[Target]:
    """The share of the copies that is hidden, and the cost where it nearly all is, for `figures.py`."""
    what = f"{result.case.message_mib} MiB, {result.case.bubble_share:.0%} bubbles"
    share = result.inside()
    values = f"{share.median:.0%} ({share.low:.0%}-{share.high:.0%})"
    return [figure(f"share of log copies hidden in bubbles, {what}", values), *judge([result])]


def report(results: list[Result], targets: list[Target], args: argparse.Namespace) -> str:
    """All results as Markdown."""
    head = ["message", "bubbles", "off, ms", "in bubbles / off", "synchronous / off"]
    head += ["copied inside", "copies, ms", "bubbles, ms", "GB/s", "held back, ms", "pool, MiB"]
    rows = [
        [
            *(f"{result.case.message_mib} MiB", f"{result.case.bubble_share:.0%}"),
            Summary.of([1000 * s for s in result.iteration_s("off")]).text("", 2),
            *(result.ratio(mode).text("") for mode in MODES[1:]),
            f"{result.inside().median:.0%}",
            f"{1000 * result.of_stats(_copied_s).median:.2f}",
            f"{1000 * result.of_stats(lambda a: a.bubble_s).median:.2f}",
            f"{result.gb_per_s(args.slots).median:.1f}",
            f"{1000 * result.of_stats(lambda a: a.held_back_s).median:.2f}",
            f"{result.of_stats(lambda a: a.pool_high_water_bytes).high / 2**20:.0f}",
        ]
        for result in results
    ]
    intro = (
        f"{args.workers} worker(s) on one {torch.cuda.get_device_name()}: per iteration {args.slots} times "
        f"a wait, {args.compute_ms:g} ms of computation and a message sent; as many are received. "
        f"{'Written to a store' if args.store else 'Not written'}. Milliseconds are per iteration; medians "
        f"(ranges) of {args.repetitions} interleaved runs of {args.iterations} iterations. The target is for "
        f"cases with at least {FITS:.0%} of the copies' time inside of bubbles."
    )
    return "\n\n".join([intro, table(head, rows), *([target_table(targets)] if targets else [])])


def as_json(results: list[Result], targets: list[Target]) -> dict[str, Any]:
    """All results as JSON."""
    return {
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "results": [asdict(result) for result in results],
        "targets": [target.to_dict() for target in targets],
    }


if __name__ == "__main__":
    sys.exit(main())
