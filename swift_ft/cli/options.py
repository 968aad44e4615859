"""The command-line options of a run, made from the fields of `RunConfig`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, get_args, get_type_hints

from swift_ft.config.option import Option, flag_of
from swift_ft.config.option_mistakes import validate
from swift_ft.config.run_config import RunConfig
from swift_ft.config.run_plan import read_plan


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of examples as they are, and adds each default that a help text does not mention."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        takes_value = bool(action.option_strings) and action.nargs != 0
        if text is None or not takes_value or "default" in text.lower() or action.default in (None, "", []):
            return text
        return f"{text.rstrip().removesuffix('.')} (default: %(default)s)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare one option per field, in a group per topic."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    types = get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        option: Option = field.metadata["option"]
        if option.topic not in groups:
            groups[option.topic] = parser.add_argument_group(option.topic)
        group = groups[option.topic]
        facts: dict[str, Any] = {"dest": field.name, "default": field.default, "help": option.help}
        kind = next(iter(get_args(types[field.name])), types[field.name])  # int of int | None
        if kind is bool:
            group.add_argument(flag_of(field.name), action="store_true", **facts)
        else:
            parse = _absolute if option.is_path else kind
            choices = option.choices or None
            group.add_argument(
                flag_of(field.name), type=parse, metavar=option.metavar, choices=choices, **facts
            )


def config_from(args: argparse.Namespace) -> RunConfig:
    """The configuration that the user gave.

    Raises:
        UsageError: one line per mistake.
    """
    config = RunConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(RunConfig)})
    if config.plan is not None:  # from now on an edit of the file changes nothing for this run
        config = dataclasses.replace(config, plan=read_plan(config.plan).to_text())
    validate(config)
    return config


def _absolute(text: str) -> str:
    """The path as workers see it who change their directory; ``-`` means a stream."""
    return text if text == "-" else str(Path(text).absolute())
