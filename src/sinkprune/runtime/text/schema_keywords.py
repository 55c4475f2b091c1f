"""Keywords of JSON schemas that llguidance accepts without keeping them. A schema with one of them is rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError

_DRAFTS = ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
_ONE = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords whose value is a schema, a list of schemas, and schemas by name."""
_IGNORED = {
    *("contains", "minContains", "maxContains", "propertyNames", "dependentRequired", "dependentSchemas"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    *("disallow", "divisibleBy", "extends"),
}
"""llguidance ignores them if the draft of the schema does not have them, and supports them in no draft."""
_KEPT = (
    *("type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    *("maxLength", "minLength", "pattern", "format", "maxItems", "minItems", "uniqueItems", "required"),
    *("maxProperties", "minProperties", "$ref", *_ONE, *_LISTS, *_MAPS),
)
# Far from annotations such as "example" and "enumNames".
_ALIKE = 0.85


def check_keywords(schema: Mapping[str, Any]) -> None:
    """Reject a schema of an unknown draft, or with keywords that would be ignored; raises `UsageError`."""
    draft = schema.get("$schema")
    if draft is not None and not (isinstance(draft, str) and _is_known(draft)):
        raise UsageError(
            f"schema has $schema {format_value(draft)}, expected draft 4, 6, 7, 2019-09 or 2020-12. Leave out "
            "$schema, or write the schema for one of them."
        )
    for part in _parts(schema):
        for name in part:
            if name in _IGNORED:
                raise UsageError(f"schema has the keyword '{name}', which is not supported. Leave it out.")
            if name not in _KEPT and (near := _misspelt(name)):
                raise UsageError(
                    f"schema has the unknown keyword {format_value(name)}. Did you mean '{near}'? If not, let its "
                    "name begin with x-."
                )
        if not isinstance(part.get("required", []), list):
            raise UsageError(
                f"schema has required {format_value(part['required'])}, expected a list of names. Write it next to "
                "properties."
            )


def _is_known(draft: str) -> bool:
    address = draft.removesuffix("#").removesuffix("/schema").partition("://")
    return address[0] in ("http", "https") and address[2] in [f"json-schema.org/{name}" for name in _DRAFTS]


def _misspelt(name: str) -> str | None:
    """Return the keyword that an unknown one was probably meant to be, or None."""
    if not name[:1].isalpha():
        # People turn a keyword off as "_pattern".
        return None
    by_letters = {known.lower(): known for known in _KEPT}
    near = get_close_matches(name.lower(), by_letters, 1, _ALIKE)
    return by_letters[near[0]] if near else None


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas in it. Names of properties, and values such as constants, are none."""
    left = list[Any]([schema])
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += [part[name] for name in _ONE if name in part]
            left += [one for name in _LISTS if isinstance(part.get(name), list) for one in part[name]]
            left += [one for name in _MAPS if isinstance(part.get(name), dict) for one in part[name].values()]
