"""What `swift-run --preload` saves: a script that imports much loses a machine, with the flag and without it.

    python -m benchmarks.recovery.imports

Four machines train the GPT of `examples/`; machine 1 gets SIGKILL one iteration after a checkpoint, and a
spare takes its place. The script imports datasets and the Trainer of transformers first, so this needs
swift-ft[integrations].
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.lib.results import Summary, argument_parser, finish, of_repetitions, run_benchmark, table
from benchmarks.recovery.recovery import replayed_run
from examples.disturbed import Failure

SCRIPT = Path(__file__).parent / "scripts" / "imports_much.py"
FAILURE = Failure(kill_iteration=4, checkpoint_every=3, script=SCRIPT)
PRELOAD = "--preload datasets,transformers.trainer"
WAYS = {"as it comes": "", PRELOAD: PRELOAD}
"""Further flags of swift-run."""
STEPS = {"reported": "kill to all reported", "live": "kill to all live"}


def main() -> int:
    """Measures in turns and prints the report."""
    args = argument_parser(__doc__, repetitions=3).parse_args()
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.repetitions):
        for way, flags in WAYS.items():
            samples[way].append(timeline(flags))
            print(f"# {way}: {samples[way][-1]}", file=sys.stderr, flush=True)
    rows = [
        [way, *(Summary.of([sample[step] for sample in some]).text() for step in STEPS)]
        for way, some in samples.items()
    ]
    body = (
        "Four machines with one worker each train the GPT of `examples/` with a script that imports datasets "
        "and the Trainer of transformers first; machine 1 gets SIGKILL, a spare takes its place. "
        f"{of_repetitions(args.repetitions)}.\n\n{table(['', *STEPS.values()], rows)}"
    )
    return finish("imports", body, {"samples": samples}, args)


def timeline(flags: str) -> dict[str, float]:
    """The steps of one recovery, in seconds after the kill."""
    failure = replace(FAILURE, flags=("--helpers", "0", *flags.split()))
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        return replayed_run(failure, Path(name) / "run").timeline()


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
