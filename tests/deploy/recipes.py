"""The recipes under ``deploy/``: their manifests, their shell scripts, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PAGES = [
    *sorted(DEPLOY.glob("*/README.md")),
    *(ROOT / "docs" / "how-to" / f"{name}.md" for name in ("slurm", "kubernetes", "ssh")),
]

_COMMANDS = {
    "swift-run": re.compile(
        r"""\bswift-run\s|"\$\{swift_run\[@\]\}"|printf '%q '|train\.sbatch\s|swift-ssh\.sh\s"""
    ),
    "swift-recover": re.compile(r"\bswift-recover\s"),
    "store": re.compile(r"""\bcli\.store\s|"\$\{swift_store\[@\]\}\""""),
}
"""What begins a command of ours: its name, or the variable that holds it."""
_END = re.compile(r"[;|)]|\s&|$")


def manifests(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [found for found in yaml.safe_load_all(path.read_text()) if found is not None]


def scripts() -> dict[str, str]:
    """Shell scripts by name: files, and those that a ConfigMap holds."""
    files = [*DEPLOY.glob("*/*.sh"), *DEPLOY.glob("*/*.sbatch")]
    found = {path.name: path.read_text() for path in sorted(files)}
    for path in MANIFESTS:
        for manifest in manifests(path):
            if manifest["kind"] == "ConfigMap":
                found |= manifest["data"]
    return found


def flags_in(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """The commands of ours in a script.

    Yields:
        Which one it is, the first word after it, and its long flags, up to the script or its end.
    """
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#"):
            continue
        for name, begin in _COMMANDS.items():
            for match in begin.finditer(line):
                rest = line[match.end() :]
                rest = rest[: next(_END.finditer(rest)).start()]
                words = list(takewhile(lambda word: not word.endswith(".py"), _words(rest)))
                flags = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
                yield name, words[0] if words else "", flags


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quotation goes on behind the end of the command
        return text.replace('"', " ").replace("'", " ").split()
