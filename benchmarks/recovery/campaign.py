"""A campaign of random faults over all topologies, which counts runs that end wrong or not at all.

Each topology is trained once undisturbed, then with random plans of one to three faults (machines, workers or
agents killed or stopped, connections broken, in steps, at checkpoints and in recoveries). The last checkpoint
of each run is compared with that of the undisturbed one, bit for bit. 500 plans take an hour on two cores.
With --keep, a campaign that was interrupted goes on where it was.

With ``--faults all`` (``make chaos``) all kinds of faults are drawn: errors of the store, damaged files, slow
and frozen processes, clocks that jump, and, where this host allows them, networks that are cut.

Most runs are forked from a process that has torch imported, and have as many spares as their plan has faults.
The undisturbed ones, and one seed in twenty, begin in a new interpreter; one in ten has three spares.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.lib.results import Target, argument_parser, record, table, target_table
from examples.commands import EXAMPLES, ROOT
from swift_ft.faults import Fault, parse_faults
from swift_ft.host.networks import lacking
from swift_ft.testing.chaos.campaign import Campaign
from swift_ft.testing.chaos.forked_launchers import ForkServer
from swift_ft.testing.chaos.kinds import weights_of
from swift_ft.testing.chaos.launchers import LAUNCHERS, StoppedError
from swift_ft.testing.chaos.plans import Shape
from swift_ft.testing.chaos.trial import Outcome, Training, Trial

_ITERATIONS = 8
_SMALL = ("--width=32", "--heads=2", "--sequence=32", "--microbatch-size=1", "--layers=8")
_PLACES = ("--iterations", str(_ITERATIONS), "--checkpoint-every", "4", "--store", "{folder}/store")
_SHARDED = str(ROOT / "benchmarks" / "recovery" / "scripts" / "sharded.py")
_OUTCOMES = "outcomes.jsonl"
_EXECUTED = 20
"""One seed in so many, and each undisturbed run, begins in a new interpreter. All others are forked."""
_APART = 1_000_000
"""Between the first seeds of two topologies: with the same ones, all would meet the same faults."""
_MANY_SPARES, _WITH_MANY, _OF_THESE = 3, 10, 3
"""Spares of one seed in ten, those that end in a 3. All others have as many as their plan can use."""
_COSTS = ("attempts", "spent_s", "cpu_s")
"""Fields of a trial that say what its seed has cost."""
_LISTS = ("missed", "ways")
"""Fields of a trial that are lists: its faults that did not strike, and how it has recovered."""
_EXPLAINED = (Outcome.ENDED, Outcome.DAMAGED)
"""Good outcomes, of which the report has the reasons."""
_BAD = tuple(outcome for outcome in Outcome if not outcome.is_good and outcome != Outcome.NOT_STRUCK)


@dataclass(frozen=True, slots=True)
class Topology:
    """What is trained, and where.

    Attributes:
        machines: number of machines.
        workers: number of workers on each.
        script: with its options.
        flags: more of them for swift-run.
        microbatches: of the script.
        copies: it has memory checkpoints.
        domains: failure domains of machines and spares, in this order; empty if it has none.
        spares: machines that wait for a loss; None for as many as a plan has faults.
    """

    machines: int
    workers: int
    script: tuple[str, ...]
    flags: tuple[str, ...] = ()
    microbatches: int = 4
    copies: bool = False
    domains: tuple[str, ...] = ()
    spares: int | None = None

    def launch(self, spares: int) -> tuple[str, ...]:
        """The flags of swift-run, with so many machines that wait for a loss, unless it has its own."""
        spares = spares if self.spares is None else self.spares
        domains = ",".join(self.domains[: self.machines + spares])
        return (
            *("--machines", str(self.machines), "--nproc-per-node", str(self.workers)),
            *("--spares", str(spares)),
            *(("--failure-domain", domains) if domains else ()),
            *self.flags,
        )


def _example(name: str, *options: str) -> tuple[str, ...]:
    return (str(EXAMPLES / name), *_SMALL, *options, *_PLACES)


def _sharded(machines: int, *domains: str) -> Topology:
    """FSDP2 without a replica: a loss leads to memory checkpoints, or else to the store."""
    options = ("--way", "memory", "--width", "32", "--snapshot-every", "2")
    lengths = ("--iterations", str(_ITERATIONS), "--checkpoint-every", "4")
    return Topology(
        machines,
        1,
        (_SHARDED, *options, *lengths, "--folder", "{folder}"),
        microbatches=1,
        copies=True,
        domains=domains,
    )


def _of_shards(name: str) -> tuple[str, ...]:
    """An example that has memory checkpoints of its shards."""
    return _example(name, "--microbatches=4", "--snapshot-every=2")


_PIPELINE = _example("train_swift.py", "--microbatches=8")
_REPLICAS = _example("train_ddp.py", "--microbatches=4")
_LAYERS = _example("train_elastic.py", "--microbatches=8", "--exact")
_NO_HELPERS = ("--helpers", "0")

TOPOLOGIES = {
    "pipeline 4x1": Topology(4, 1, _PIPELINE, _NO_HELPERS, 8),
    "pipeline 4x1, helpers": Topology(4, 1, _PIPELINE, microbatches=8),
    "pipeline 2x2": Topology(2, 2, _PIPELINE, _NO_HELPERS, 8),
    "interleaved 4x1": Topology(4, 1, (*_PIPELINE, "--schedule=Interleaved1F1B"), microbatches=8),
    "zero bubble 2x1": Topology(2, 1, (*_PIPELINE, "--schedule=ZBVZeroBubble"), microbatches=8),
    "replicas 2x1": Topology(2, 1, _REPLICAS),
    "replicas 2x2, wait-free": Topology(2, 2, (*_REPLICAS, "--wait-free", "--exact")),
    "hybrid 4x1": Topology(4, 1, _example("train_hybrid.py", "--microbatches=4")),
    "layers 4x1": Topology(4, 1, _LAYERS, microbatches=8),
    "layers 4x1, no spare": Topology(4, 1, _LAYERS, microbatches=8, spares=0),
    "two-way 2x1": Topology(2, 1, (*_PIPELINE, "--schedule=DualPipeV"), microbatches=8),
    "tensor parallel 2x2": Topology(2, 2, _example("train_tensor_parallel.py", "--microbatches=4")),
    "HSDP 4x1": Topology(4, 1, _example("train_hsdp.py", "--microbatches=4")),
    "experts 4x1": Topology(4, 1, _of_shards("train_moe.py"), copies=True),
    "context parallel 4x1": Topology(4, 1, _of_shards("train_context_parallel.py"), copies=True),
    "pipeline 4x1, audited": Topology(4, 1, _PIPELINE, ("--audit",), 8),
    "sharded 2x1, copies": _sharded(2),
    "sharded 4x1, copies in two domains": _sharded(4, *"aabbaba"),
}


def main() -> int:
    """Run the campaign and print the report. Returns 1 if any run had a bad outcome."""
    parser = argument_parser(__doc__, repetitions=1)
    parser.add_argument("--plans", type=int, default=500, help="in all, default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first plan, default: %(default)s")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, default: %(default)s")
    parser.add_argument(
        "--keep", type=Path, help="for outcomes, and the files of runs that are not identical"
    )
    parser.add_argument("--only", choices=[*TOPOLOGIES], metavar="TOPOLOGY", help="one topology")
    parser.add_argument(
        "--faults", default="", help="kinds, as swift-chaos has them, default: kill, stop, break"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=1e9,
        help="begin no further plan after that time, shared by topologies",
    )
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="swift-campaign-"))
    names = [args.only] if args.only else list(TOPOLOGIES)
    began = time.monotonic()
    try:
        with LAUNCHERS.stopped_by_signals():
            found = {
                name: _run(
                    name,
                    folder,
                    args.seed + _APART * list(TOPOLOGIES).index(name),
                    args.plans * (i + 1) // len(names) - args.plans * i // len(names),
                    args.parallel,
                    args.faults,
                    args.minutes / len(names),
                )
                for i, name in enumerate(names)
            }
    except StoppedError as error:
        parser.exit(128 + error.number, f"{error}: with --keep another run goes on from here\n")
    minutes = (time.monotonic() - began) / 60
    asked = 5000 if args.faults else 500
    body = report(found, args.seed, minutes, asked)
    if args.json:
        print(json.dumps({name: [_facts(trial) for trial in trials] for name, trials in found.items()}))
    else:
        print(body)
    if args.record:
        record("chaos" if args.faults else "campaign", body, args)
    return 1 if any(_is_bad(trial) for trials in found.values() for trial in trials) else 0


def _is_bad(trial: Trial) -> bool:
    """Whether it is a finding: also if it ended with an error that no fault had a part in."""
    return trial.outcome in _BAD or _ended_by_itself(trial)


def _ended_by_itself(trial: Trial) -> bool:
    return trial.outcome == Outcome.NOT_STRUCK and bool(trial.reason)


def _run(
    name: str, folder: Path, seed: int, plans: int, parallel: int, faults: str, minutes: float
) -> list[Trial]:
    its = TOPOLOGIES[name]
    networks = bool(faults) and not lacking()
    launch = ("--standalone", "--heartbeat-timeout", "4", *["--networks"] * networks)
    training = Training(launch, its.script, "{folder}/store", deadline_s=200)
    shape = Shape(its.machines, its.workers, _ITERATIONS, its.microbatches, copies=its.copies)
    notes = _Notes(name, folder / name.replace(" ", "-").replace(",", ""), range(seed, seed + plans))
    if not notes.missing() or minutes <= 0:
        return notes.trials()
    if faults:
        shape = replace(shape, weights=weights_of(faults.split(","), networks=networks))
    until = time.monotonic() + 60 * minutes
    with ForkServer() as server:
        campaign = Campaign(
            training,
            shape,
            notes.place,
            seed,
            plans,
            parallel,
            learns=bool(faults),
            adapted=partial(_adapted, its, server),
        )
        references = campaign.prepare()
        missing = {one: references[one] for one in notes.missing()}
        for _ in campaign.run(missing, until=until, on_end=notes.add):
            pass  # it is noted: a slow run keeps no quicker one of a later seed waiting
    return notes.trials()


def _adapted(
    its: Topology, server: ForkServer, training: Training, seed: int | None, plan: Sequence[Fault]
) -> Training:
    """The training of one run: most are forked, with a spare for each fault.

    What these do not try is tried by some: how an interpreter begins, and spares that nobody needs.
    """
    spares = _MANY_SPARES if seed is not None and seed % _WITH_MANY == _OF_THESE else len(plan)
    executed = seed is None or seed % _EXECUTED == 0
    launch = (*training.launch, *its.launch(spares))
    return replace(training, launch=launch, server=None if executed else server)


class _Notes:
    """The outcomes of a topology, by seed: those of an interrupted campaign, and each new one at its end.

    Args:
        name: the topology's.
        place: where its runs have their files.
        seeds: of all its plans.
    """

    def __init__(self, name: str, place: Path, seeds: range) -> None:
        self.place = place
        self._name, self._seeds, self._lock = name, seeds, threading.Lock()
        self._trials = _earlier(place, seeds)

    def missing(self) -> list[int]:
        """The seeds that have no outcome. Any may: runs do not end in the order of their seeds."""
        return [seed for seed in self._seeds if seed not in self._trials]

    def trials(self) -> list[Trial]:
        """All that there are, in the order of their seeds."""
        return [self._trials[seed] for seed in self._seeds if seed in self._trials]

    def add(self, trial: Trial) -> None:
        """Note one more, and print it unless it is identical. In any thread."""
        assert trial.seed is not None, "its plan was drawn"
        with self._lock:
            self._trials[trial.seed] = trial
            with (self.place / _OUTCOMES).open("a") as outcomes:
                outcomes.write(json.dumps(_facts(trial)) + "\n")
            if trial.outcome != Outcome.IDENTICAL:
                said = f"{self._name}: {trial.outcome}: {trial.plan}: {trial.reason}"
                print(said, file=sys.stderr, flush=True)


def _earlier(place: Path, seeds: range) -> dict[int, Trial]:
    """The outcomes of an interrupted campaign, by seed.

    Lines without a seed are from a time when runs were noted in the order of their seeds. Where a run ended
    by its faults, and with exit code 0, its last checkpoint was damaged: that had no name of its own.
    """
    if not (place / _OUTCOMES).exists():
        return {}
    found = {}
    for number, line in enumerate((place / _OUTCOMES).read_text().splitlines()):
        facts = json.loads(line)
        seed = facts.get("seed", seeds.start + number)
        outcome = Outcome(facts["outcome"])
        if outcome == Outcome.ENDED and facts["code"] == 0:
            outcome = Outcome.DAMAGED
        trial = Trial(facts["plan"], outcome, facts["code"], facts["reason"], {}, place)
        known = {key: facts[key] for key in _COSTS if key in facts}
        known |= {key: tuple(facts[key]) for key in _LISTS if key in facts}
        found[seed] = replace(trial, seed=seed, **known)
    return found


def report(found: dict[str, list[Trial]], seed: int, minutes: float, asked: int = 500) -> str:
    """The tables of a campaign, and what did not end identical."""
    rows, all_of_them = [], Counter[Outcome]()
    for name, trials in found.items():
        counts = Counter(trial.outcome for trial in trials)
        all_of_them += counts
        faults = sum(trial.plan.count(";") + 1 for trial in trials)
        rows.append([name, str(len(trials)), str(faults), *(str(counts[outcome]) for outcome in Outcome)])
    total, by_itself = sum(all_of_them.values()), sum(map(_ended_by_itself, chain(*found.values())))
    struck = total - all_of_them[Outcome.NOT_STRUCK]
    targets = [
        Target("plans of which a fault struck", f">= {asked}", str(struck), struck >= asked),
        *(Target(str(bad).lower(), "0", str(all_of_them[bad]), all_of_them[bad] == 0) for bad in _BAD),
        Target("ended before any fault", "0", str(by_itself), by_itself == 0),
    ]
    reasons = Counter((t.outcome, t.reason) for t in chain(*found.values()) if t.outcome in _EXPLAINED)
    lines = [f"- {count} {outcome}: {reason}" for (outcome, reason), count in reasons.most_common()]
    head = ["topology", "plans", "faults", *(outcome.lower() for outcome in Outcome)]
    said = (
        f"Seeds from {seed} on, those of each further topology {_APART:,} later. The last sitting took "
        f"{minutes:.0f} minutes."
    )
    trials = [*chain(*found.values())]
    return "\n\n".join(
        [
            said,
            table(head, rows),
            *(["\n".join(lines)] if lines else []),
            *_what_struck(trials),
            target_table(targets),
        ]
    )


def _what_struck(trials: Sequence[Trial]) -> list[str]:
    """How many faults of each kind, and at each point, have struck of those drawn; and by which ways back."""
    kinds: dict[str, list[bool]] = defaultdict(list)
    points: dict[str, list[bool]] = defaultdict(list)
    for trial in trials:
        missed = Counter(trial.missed)
        for fault in parse_faults(trial.plan):
            struck = not missed[str(fault)]
            if not struck:
                missed[str(fault)] -= 1  # the same one may be in a plan twice
            kinds[fault.action].append(struck)
            points[fault.point].append(struck)
    ways = Counter(chain(*(trial.ways for trial in trials)))
    return [
        f"Struck of those that were drawn, by kind: {_counted(kinds)}.",
        f"By point: {_counted(points)}.",
        f"Recoveries: {', '.join(f'{way} {count}' for way, count in ways.most_common()) or 'none'}.",
    ]


def _counted(struck: dict[str, list[bool]]) -> str:
    ordered = sorted(struck.items(), key=lambda item: (-sum(item[1]), item[0]))
    return ", ".join(f"{name} {sum(each)}/{len(each)}" for name, each in ordered)


def _facts(trial: Trial) -> dict[str, object]:
    told = {"plan": trial.plan, "outcome": trial.outcome, "code": trial.code, "reason": trial.reason}
    return {**told, "seed": trial.seed, **{key: getattr(trial, key) for key in (*_COSTS, *_LISTS)}}


if __name__ == "__main__":
    sys.exit(main())
