"""Values of a request's JSON in messages, in the words of JSON: clients need not know Python."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sinkprune.contract.checks.terminal import escaped

_SHOWN = 80
_KINDS: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def json_kind(value: object) -> str:
    """Return the type of parsed JSON with its article, as in "a string" and "an object"."""
    return _KINDS[type(value)]


def format_json(value: object) -> str:
    """Return parsed JSON as a client writes it, on one line; long values are cut off."""
    text = escaped(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def format_field(given: Mapping[str, object], name: str) -> str:
    """Return a field's value as `format_json` does, or "missing" where an object has no such field."""
    return format_json(given[name]) if name in given else "missing"
