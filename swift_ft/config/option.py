"""Command line options from fields of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """The appearance of a field of :class:`swift_ft.config.run_config.RunConfig` on the command line.

    Attributes:
        help: the help text.
        topic: the heading under which the help shows it.
        metavar: the name of the value in the help text.
        minimum: the lowest allowed value; None for no bound.
        maximum: the highest allowed value; None for no bound.
        above: the value must be greater than this; None for no bound.
        choices: the allowed values; none for any.
        is_path: the value is a path. It is made absolute, because workers may change their directory.
        same_everywhere: a machine that was started with another value is refused.
        by_digest: the value is long, and compared by its digest.
    """

    help: str
    topic: str
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    is_path: bool = False
    same_everywhere: bool = False
    by_digest: bool = False

    def mistake(self, flag: str, value: float) -> str | None:
        """The line for the user if a number is out of bounds."""
        if self.above is not None and not value > self.above:
            return f"{flag} must be more than {self.above:g}, not {value}."
        if self.minimum is not None and not value >= self.minimum:
            return f"{flag} must be at least {self.minimum:g}, not {value}."
        if self.maximum is not None and not value <= self.maximum:
            return f"{flag} must be at most {self.maximum:g}, not {value}."
        return None


def option(topic: str, default: Any, help: str, **facts: Any) -> Any:
    """A field with an option. The facts are attributes of :class:`Option`."""
    return field(default=default, metadata={"option": Option(help, topic, **facts)})


def flag_of(name: str) -> str:
    """The command-line flag of a field: ``--join-timeout`` for ``join_timeout_s``."""
    return "--" + name.removesuffix("_s").replace("_", "-")
