"""What ``swift-run --events-log`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from docs.reference import MEANINGS
from swift_ft.cli.news import KINDS

_SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "events.schema.json").read_text())


def checked_lines(text: str) -> list[dict[str, Any]]:
    """The lines, checked against the schema and against the documented names."""
    Draft202012Validator.check_schema(_SCHEMA)
    lines = [json.loads(line) for line in text.splitlines()]
    schema = Draft202012Validator(_SCHEMA)
    assert [error.message for line in lines for error in schema.iter_errors(line)] == []
    assert {line["event"] for line in lines} <= KINDS.keys() | MEANINGS.keys()
    return lines
