"""Small faults planted in the recovery protocol, each to be found by a scenario or a simulated job.

    python -m tests.support.protocol_mutants --count 150 --seed 0

Each fault is planted in one module of the protocol, its plans, its changes of worlds, or of a worker's core,
which simulated jobs run as real ones do, in a process of its own. First all scenarios run, then seeds of all
kinds of simulated jobs, then the unit tests of the protocol or of the core.
A fault that nobody finds changes nothing that counts (:data:`SAME` says why), or a scenario is missing.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from tests.support.mutants import Mutant, mutants

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "tests" / "scenarios"
UNIT_TESTS = {
    "recovery": (ROOT / "tests" / "unit" / "recovery",),
    "runtime": (ROOT / "tests" / "unit" / "runtime" / "worker" / "test_core.py",),
}
"""By the package, without those that plant faults of their own."""
UNIT = "a unit test"
_PROTOCOL = (
    *("handlers.membership", "handlers.recovery", "handlers.generations", "handlers.newcomers"),
    *("handlers.checkpoints", "handlers.failures", "handlers.guests", "handlers.layouts", "handlers.worlds"),
    *("plan", "orders", "membership", "attempts", "helpers", "holders", "memory", "survivors", "worlds"),
    *("guests", "targets", "next_world", "occupancy", "handlers.audits", "audit_orders"),
)
_WORKERS = ("core", "failures", "flow", "part", "status")
MODULES = (
    *(f"runtime.worker.{name}" for name in _WORKERS),
    *(f"recovery.{name}" for name in _PROTOCOL),
)
"""Within ``swift_ft``."""
SEEDS = 12
"""Of each kind of job."""
LIMIT_S = 400
_ASKED = 150
_KINDS = ("a scenario", "a simulated job", UNIT, "the same", "survived")
"""What becomes of a fault."""
SAME: dict[str, str] = {}
"""Faults after which all is the same, by module and name, and why."""


class Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module with a fault.

    Args:
        name: of the module.
        mutant: its source.
    """

    def __init__(self, name: str, mutant: Mutant) -> None:
        self._name, self._mutant = name, mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Its own, for the one module."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the faulty source."""
        exec(compile(self._mutant.source, self._mutant.name, "exec"), module.__dict__)


def finds(module: str, mutant: Mutant) -> str:
    """What finds a fault; empty if nothing does. In a process that has imported nothing of the protocol."""
    sys.meta_path.insert(0, Planting(module, mutant))
    try:
        from swift_ft.testing.scenario import Scenario
        from swift_ft.testing.simulation import JobKind, simulate

        for path in sorted(SCENARIOS.glob("*.txt")):
            try:
                Scenario().run(path)
            except Exception:
                return path.stem
        for seed in range(SEEDS):
            for kind in JobKind:
                try:
                    simulate(kind, seed, 4)
                except Exception:
                    return f"{kind} {seed}"
    except Exception as error:
        return f"{type(error).__name__} as it is imported"
    tests = map(str, UNIT_TESTS[module.split(".")[1]])
    known = "ignore::pytest.PytestAssertRewriteWarning"  # this module is one of those that it rewrites
    code = pytest.main(["-x", "-q", "-W", known, "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    if code == pytest.ExitCode.OK:
        return ""
    return UNIT if code == pytest.ExitCode.TESTS_FAILED else f"pytest's exit code {code}"


def found_by(module: str, mutant: Mutant) -> str:
    """The same in a process of its own, which has a limit: a fault may also make an endless loop."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        signal.alarm(LIMIT_S)
        for fd in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        os.write(write, finds(module, mutant).encode() or b"-")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        text = said.read().decode()
    os.waitpid(pid, 0)
    return "" if text == "-" else text or "a limit of time"


def planted(modules: Sequence[str] = MODULES) -> list[tuple[str, Mutant]]:
    """All faults of some modules, with the modules that they are in."""
    found = []
    for name in modules:
        found += [(f"swift_ft.{name}", mutant) for mutant in mutants(source_of(name))]
    return found


def source_of(name: str) -> str:
    """The source of a module within ``swift_ft``."""
    return (ROOT / "swift_ft" / f"{name.replace('.', '/')}.py").read_text()


def kind_of(by: str) -> str:
    """The kind of what has found a fault."""
    if not by or by == UNIT:
        return by or "survived"
    return "a scenario" if (SCENARIOS / f"{by}.txt").exists() else "a simulated job"


def main() -> int:
    """Plant some, and say which nobody finds. Returns 1 if there are such."""
    parser = argument_parser(__doc__, repetitions=1)
    parser.add_argument("--count", type=int, default=_ASKED, help="drawn from all, default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, default: %(default)s")
    parser.add_argument(
        "--modules", nargs="+", choices=MODULES, default=MODULES, metavar="NAME", help="default: all"
    )
    args = parser.parse_args()
    for name in (MODULES[0], MODULES[-1]):  # of both packages
        if by := found_by(f"swift_ft.{name}", Mutant("as it is", ast.parse(source_of(name)))):
            parser.error(f"{by} fails without any fault")
    faults = planted(args.modules)
    drawn = random.Random(args.seed).sample(faults, min(args.count, len(faults)))
    ways: dict[str, Counter[str]] = {}
    survivors: list[str] = []
    for number, (module, mutant) in enumerate(drawn, 1):
        by = found_by(module, mutant)
        name = f"{module.removeprefix('swift_ft.')}: {mutant.name}"
        kind = kind_of(by)
        if not by and name in SAME:
            kind = "the same"
        ways.setdefault(module, Counter())[kind] += 1
        if kind == "survived":
            survivors.append(name)
        print(f"{number} of {len(drawn)}  {name}: {by or kind}", file=sys.stderr, flush=True)
    facts = {"ways": ways, "survivors": survivors}
    return finish("mutants", report(ways, survivors, len(faults)), facts, args, well=not survivors)


def report(ways: Mapping[str, Mapping[str, int]], survivors: Sequence[str], there: int) -> str:
    """The tables.

    Args:
        ways: by module, the number of faults that each kind of test has found.
        survivors: those that nobody has found.
        there: the number of faults from which they were drawn.
    """
    rows = [
        [module, str(sum(found.values())), *(str(found.get(kind, 0)) for kind in _KINDS)]
        for module, found in sorted(ways.items())
    ]
    drawn = sum(sum(found.values()) for found in ways.values())
    targets = [
        Target("planted faults", f">= {_ASKED}", str(drawn), drawn >= _ASKED),
        Target("survived", "0", str(len(survivors)), not survivors),
    ]
    lines = [f"- survived: {name}" for name in survivors]
    return "\n\n".join(
        [
            f"Drawn from {there} faults.",
            table(["module", "faults", *(f"found by {kind}" for kind in _KINDS[:3]), *_KINDS[3:]], rows),
            *(["\n".join(lines)] if lines else []),
            target_table(targets),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
