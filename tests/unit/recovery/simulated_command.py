"""One seed of a simulation: on the command line, and with its name in what went wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulated_store import Violation

if TYPE_CHECKING:
    from simulation import Outcome, Simulation

__all__ = ["main", "run_seed"]


def run_seed(sim: Simulation, command: str) -> Outcome:
    """Run a simulation; what goes wrong names the command that runs it again."""
    try:
        return sim.run()
    except Exception as error:
        raise Violation(f"seed {sim.seed}: {error}\nto see it: {command}") from error


def main(simulate: Callable[..., Outcome]) -> None:
    """The command line of one seed."""
    parser = argparse.ArgumentParser(description="Run one seeded failure order and print its journal.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--shape", default="4x1", help="machines x workers per machine")
    parser.add_argument("--bare", action="store_true", help="a script without a session")
    args = parser.parse_args()
    machines, workers = (int(n) for n in args.shape.split("x"))
    options = {"bare": True} if args.bare else {}
    print(simulate(args.seed, machines, workers, trace=True, **options))
