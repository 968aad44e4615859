"""The list of all decisions in docs/decisions/index.md, from their first lines.

``python -m docs.decision_list`` writes it anew; with ``--check`` it fails if the page is old.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from docs.generated import write_or_check
from docs.house import ROOT

FOLDER = ROOT / "docs" / "decisions"

AREAS: Mapping[str, str] = {
    "protocol": "The journal and the protocol",
    "scale": "Thousands of machines",
    "elasticity": "Fewer, more, and slower machines",
    "worker": "A worker's way through a step and a replay",
    "replicas": "Replicas and the undo",
    "log": "The message log",
    "planning": "Layouts and groups",
    "stores": "Stores that jobs meet in",
    "communication": "Communication",
    "processes": "Processes",
    "detection": "Detecting a loss",
    "checkpoints": "Checkpoints and state",
    "code": "The code",
}
"""What a decision's line ``Area:`` may say, and its heading in the list."""

_HEAD = """\
# Decisions

Why things are as they are. Each page is one decision: what led to it, what was decided, and what was
measured. A decision that no longer holds is rewritten; what it replaced becomes its context.
[CONTRIBUTING](../../CONTRIBUTING.md#decisions) says when to write one. `make docs` makes this list.
"""


@dataclass(frozen=True)
class Decision:
    """The first lines of a decision's page."""

    number: int
    title: str
    area: str


def parse(text: str) -> Decision:
    """Reads the title and the area of a page.

    Raises:
        ValueError: if the page does not begin with both, if its area is unknown, or if its sections are not
            Context, Decision and, optionally, Numbers.
    """
    match = re.match(r"# (\d+)\. (.+)\n\nArea: (\w+)\n\n", text)
    if match is None:
        raise ValueError("a decision begins with '# NUMBER. TITLE', an empty line, and 'Area: NAME'")
    if match[3] not in AREAS:
        raise ValueError(f"{match[3]!r} is no area: take one of {', '.join(AREAS)}")
    sections = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    if sections not in (["Context", "Decision"], ["Context", "Decision", "Numbers"]):
        raise ValueError(f"a decision has the sections Context, Decision and perhaps Numbers, not {sections}")
    return Decision(int(match[1]), match[2], match[3])


def read() -> dict[Path, Decision]:
    """All decisions, by their file, in the order of their numbers."""
    return {path: parse(path.read_text()) for path in sorted(FOLDER.glob("[0-9]*.md"))}


def document(decisions: Mapping[Path, Decision]) -> str:
    """The page that lists them, one table for each area."""
    lines = defaultdict(list)
    for path, decision in decisions.items():
        lines[decision.area].append(f"| {decision.number} | [{decision.title}]({path.name}) |")
    tables = (
        f"\n## {heading}\n\n| | |\n| --- | --- |\n" + "\n".join(lines[area]) + "\n"
        for area, heading in AREAS.items()
        if lines[area]
    )
    return _HEAD + "".join(tables)


if __name__ == "__main__":
    sys.exit(write_or_check("docs.decision_list", __doc__, lambda: {FOLDER / "index.md": document(read())}))
