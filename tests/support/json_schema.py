"""A check against the part of JSON Schema that docs/events.schema.json uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES = {"string": str, "integer": int, "object": dict, "null": type(None)}
_KNOWN = {
    "$schema", "title", "description", "type", "required", "additionalProperties", "properties", "const",
    "enum", "pattern", "minimum",
}  # fmt: skip


def mistakes(value: Any, schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """What a value has that the schema does not allow.

    Raises:
        LookupError: if the schema uses what is not checked here.
    """
    if odd := schema.keys() - _KNOWN:
        raise LookupError(f"not checked: {odd}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, _TYPES[k]) and not isinstance(value, bool) for k in kinds):
        yield f"{at}: {value!r} is no {kinds}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{at}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"
    if "minimum" in schema and value is not None and value < schema["minimum"]:
        yield f"{at}: {value!r} is too small"
    if isinstance(value, dict) and "properties" in schema:
        yield from (f"{at}: {name} is missing" for name in schema["required"] if name not in value)
        for name, part in value.items():
            if name not in schema["properties"]:
                yield f"{at}: {name} is unknown"
            else:
                yield from mistakes(part, schema["properties"][name], f"{at}.{name}")
