"""Options of torchrun that not every torch has: ``--shutdown-timeout`` since 2.12."""

from __future__ import annotations

from argparse import ArgumentParser

from torch.distributed.argparse_util import env


def add_missing_options(parser: ArgumentParser) -> None:
    """Give torchrun's parser the options that this project relies on, where it lacks them."""
    if not any(action.dest == "shutdown_timeout" for action in parser._actions):
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", action=env, type=int)
