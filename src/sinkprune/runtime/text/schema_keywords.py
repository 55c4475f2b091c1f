"""Keywords of JSON schemas, and the schemas within a schema. Keywords that llguidance would ignore are rejected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError

_DRAFTS = ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords whose value is schemas by name."""
_OTHERS = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties")
"""Keywords whose value is a schema or a list of schemas."""
_IGNORED = {
    *("contains", "minContains", "maxContains", "propertyNames", "dependentRequired", "dependentSchemas"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    *("disallow", "divisibleBy", "extends"),
}
"""llguidance ignores them if the draft of the schema does not have them, and supports them in no draft."""
_KEPT = (
    *("type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    *("maxLength", "minLength", "pattern", "format", "maxItems", "minItems", "uniqueItems", "required"),
    *("maxProperties", "minProperties", "$ref", *_OTHERS, *_MAPS),
)
_OTHER_NAMES = {
    **dict.fromkeys(("regex", "regexp"), "pattern"),
    **dict.fromkeys(("choices", "values", "allowed"), "enum"),
    **dict.fromkeys(("ge", "range"), "minimum"),
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "length": "maxLength",
}
"""Keywords, by names that Python's libraries have for the same."""
_BY_LETTERS = {known.lower(): known for known in _KEPT}
# Far from annotations such as "example" and "enumNames".
_ALIKE = 0.85
_SHORTEST = 3
_SHOWN = 80

Place = tuple[str, ...]
"""Names of fields on the way to a part of a schema, as in `("properties", "colour", "if")`."""


def check_keywords(schema: dict[str, Any]) -> None:
    """Reject a schema of an unknown draft, or with keywords that would be ignored; raises `UsageError`."""
    draft = schema.get("$schema")
    if draft is not None and not (isinstance(draft, str) and _is_known(draft)):
        raise UsageError(
            f"schema has $schema {format_value(draft)}, expected draft 4, 6, 7, 2019-09 or 2020-12. Leave out "
            "$schema, or write the schema for one of them."
        )
    for place, part in schema_parts((), schema):
        for name in part:
            if name in _IGNORED:
                raise UsageError(f"schema has a keyword{at((*place, name))} that is not supported. Leave it out.")
            if name not in _KEPT and (near := _misspelt(name)):
                raise UsageError(
                    f"schema has an unknown keyword{at((*place, name))}. Did you mean '{near}'? If not, let its name "
                    "begin with x-."
                )
        if not isinstance(part.get("required", []), list):
            raise UsageError(
                f"schema has {format_value(part['required'])}{at((*place, 'required'))}, expected a list of names. "
                "Write it next to properties."
            )


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the schemas directly within a schema, and their places, definitions first.

    Values such as constants are no schemas, and names of properties no keywords.
    """
    for keyword in (*_MAPS, *_OTHERS):
        # Schemas of the largest size have thousands of parts with few keywords.
        if keyword not in schema:
            continue
        value = schema[keyword]
        inner: Iterable[tuple[Place, Any]] = [((keyword,), value)]
        if isinstance(value, list):
            inner = (((keyword, str(number)), one) for number, one in enumerate(value))
        elif keyword in _MAPS and isinstance(value, dict):
            inner = (((keyword, name), one) for name, one in value.items())
        yield from ((place, one) for place, one in inner if isinstance(one, dict))


def schema_parts(place: Place, schema: dict[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield a schema and all schemas in it, with their places."""
    yield place, schema
    for inner, part in subschemas(schema):
        yield from schema_parts((*place, *inner), part)


def at(place: Place) -> str:
    """Return where a part of a schema is, as in " at 'properties/colour/if'"; "" for the schema itself."""
    # Quoted, and on one line. The end of a long place matters most.
    text = repr("/".join(place))
    return f" at {text if len(text) <= _SHOWN else f'{text[0]}...{text[-_SHOWN:]}'}" if place else ""


def _is_known(draft: str) -> bool:
    address = draft.removesuffix("#").removesuffix("/schema").partition("://")
    return address[0] in ("http", "https") and address[2] in [f"json-schema.org/{name}" for name in _DRAFTS]


def _misspelt(name: str) -> str | None:
    """Return the keyword that an unknown name was probably meant to be, or None for an annotation."""
    if not name[:1].isalpha():
        # People turn a keyword off as "_pattern".
        return None
    word = name.lower().replace("_", "")
    if word in _OTHER_NAMES:
        return _OTHER_NAMES[word]
    # Shortened, as "min" and "maxLen".
    near = [known for known in _BY_LETTERS if known.startswith(word) and len(word) >= _SHORTEST]
    # Enough letters in common: difflib is slow, and a schema may have thousands of names.
    able = [
        known
        for known in _BY_LETTERS
        if 2 * sum(letter in known for letter in word) >= _ALIKE * (len(word) + len(known))
    ]
    near += get_close_matches(word, able, 1, _ALIKE)
    return _BY_LETTERS[near[0]] if near else None
