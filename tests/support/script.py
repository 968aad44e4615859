"""The command line of scripts that train the GPT of `examples/`."""

from __future__ import annotations

import argparse

from gpt import argument_parser


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of the model, ``--store`` and ``--checkpoint-every``."""
    parser = argument_parser(description)
    parser.add_argument("--store")
    parser.add_argument("--checkpoint-every", type=int)
    return parser
