"""``--version``, and the ``--help`` of long command lines: twenty lines for a first user, without torch.

A parser's own help has all options: ``--help-all`` shows it, and docs/reference.md is made from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from swift_ft.config.installed import installed_version


@dataclass(frozen=True, slots=True)
class FirstHelp:
    """A short help.

    Attributes:
        usage: the command and its arguments.
        purpose: one or two lines.
        groups: headings, each with options, as they are typed, and a line for each.
        example: a command.
    """

    usage: str
    purpose: str
    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    example: str

    def __str__(self) -> str:
        """The text, for 80 columns."""
        width = max(len(typed) for _, options in self.groups for typed, _ in options)
        lines = [f"usage: {self.usage}", "", self.purpose]
        for heading, options in self.groups:
            lines += ["", f"{heading}:", *(f"  {typed:{width}}  {words}" for typed, words in options)]
        lines += ["", f"  {self.example}", "", "--help-all shows all options."]
        return "\n".join(lines) + "\n"

    @property
    def flags(self) -> list[str]:
        """All options that it names."""
        typed = (typed for _, options in self.groups for typed, _ in options)
        return [word for line in typed for word in line.split() if word.startswith("--")]


SWIFT_RUN = FirstHelp(
    "swift-run [options] script.py [arguments of the script]",
    "Start a training that survives the loss of machines. It takes torchrun's flags.",
    (
        (
            "on this host",
            (
                ("--standalone --machines N", "N machines as processes of this host"),
                ("--spares N", "more machines, which wait for a loss"),
                ("--nproc-per-node N", "workers of each machine, 1 by default"),
            ),
        ),
        (
            "on each of several hosts",
            (
                ("--nnodes N", "machines that train; those beyond N wait as spares"),
                ("--rdzv-endpoint HOST:PORT", "the first host, as all others reach it"),
                ("--rdzv-id NAME", "of the run: the same on all hosts"),
            ),
        ),
        (
            "the run",
            (
                ("--check", "what is protected, and what a loss costs"),
                ("--resume", "go on from the last checkpoint in the store"),
                ("--inject FAULTS", 'to try it: "kill machine=1 iteration=47"'),
                ("--status NAME", "show a run that is alive, at --rdzv-endpoint"),
            ),
        ),
    ),
    "swift-run --standalone --machines 4 --spares 1 train.py --lr 0.1",
)

SWIFT_SIM = FirstHelp(
    "swift-sim [options]",
    "How long a training takes if machines fail, with each way to go on.",
    (
        (
            "a job",
            (
                ("--machines N", "machines, or GPUs, that fail independently"),
                ("--mtbf-per-machine TIME", "mean time between two failures of one: 50000h"),
                ("--training-time TIME", "without failures: 54d"),
                ("--checkpoint-interval TIME", "training between checkpoints, 1h by default"),
                ("--spares N", "machines that wait, none by default"),
                ("--preset NAME", "instead of these: a job of the paper"),
            ),
        ),
        (
            "the answer",
            (
                ("--json", "for programs"),
                ("--plot FILE", "time against checkpoint interval and failures"),
                ("--trials N", "simulated trainings, 200 by default"),
            ),
        ),
    ),
    "swift-sim --machines 1000 --mtbf-per-machine 50000h --training-time 54d",
)


SWIFT_CHAOS = FirstHelp(
    "swift-chaos [options] -- script.py [arguments of the script]",
    "Run a training with random faults, and compare it with an undisturbed run.",
    (
        (
            "each run",
            (
                ("--machines N", "machines, 2 by default, as processes of this host"),
                ("--workers N", "workers of each machine, 1 by default"),
                ("{folder}", "in the script's arguments: a folder of the run's own"),
            ),
        ),
        (
            "the plans",
            (
                ("--plans N", "disturbed runs, 20 by default"),
                ("--seed N", "of the first plan; the others follow"),
                ("--faults KINDS", "such as kill,freeze, or all that this host can have"),
                ("--list-faults", "all kinds, and which this host can have"),
                ("--plan FAULTS", 'this plan alone: "kill machine=1 iteration=3"'),
            ),
        ),
        (
            "the answer",
            (
                ("--json", "for programs"),
                ("--keep DIR", "where runs keep their files"),
            ),
        ),
    ),
    "swift-chaos --machines 4 -- train.py --store {folder}/store",
)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Declare ``--version``."""
    parser.add_argument("--version", action=_ShowVersion, help="show the version of swift_ft")


def shorten_help(parser: argparse.ArgumentParser, first: FirstHelp) -> None:
    """Let ``--help`` show the short help, and ``--help-all`` what ``--help`` has shown."""
    options = parser._optionals
    options.conflict_handler = "resolve"  # there is a --help already
    shows = "show the options that a first user needs"
    options.add_argument("-h", "--help", action=_ShowFirst, const=str(first), help=shows)
    options.conflict_handler = "error"
    parser.add_argument("--help-all", action="help", help="show all options")


def answer_at_once(argv: Sequence[str], program: str, first: FirstHelp) -> str | None:
    """The whole answer to ``--help`` and ``--version``, before anything that takes time is imported."""
    match list(argv):
        case ["--help" | "-h"]:
            return str(first)
        case ["--version"]:
            return version_of(program)
    return None


def version_of(program: str) -> str:
    """A line."""
    return f"{program} {installed_version()}\n"


class _ShowVersion(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version_of(parser.prog), end="")
        parser.exit()


class _ShowFirst(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, const: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, const=const, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(self.const, end="")
        parser.exit()
