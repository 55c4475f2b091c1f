"""The form that an answer must have: a JSON schema, a regular expression or a closed list. Checked with its request.

llguidance compiles grammars. xgrammar would need torch, which robots do not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import lcm
from pathlib import Path
from typing import Any

from sinkprune.contract.checks import counted, format_value, install_command, needs_package
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json, read_json

# Forms may come from network clients, and compiling takes time and memory.
SCHEMA_BYTES = 1 << 16
REGEX_BYTES = 1 << 12
MOST_CHOICES = 256
CHOICE_BYTES = 1 << 10
# llguidance needs seconds to intersect 20 patterns, and twice the time for each further one.
MOST_PATTERNS = 12
# llguidance makes a state for each remainder, outside its limits of work. So larger ones took minutes and gigabytes.
MOST_MULTIPLE = 10_000
# llguidance compares each pair of such names with all others, outside its limits of work: 600 took minutes.
MOST_NAME_PATTERNS = 100
# llguidance computes with 32 bits: numbers of more places were taken although they are no multiples.
MULTIPLE_PLACES = 8
LIMITS = {"initial_lexer_fuel": 300_000, "max_lexer_states": 50_000, "max_grammar_size": 20_000}
"""llguidance's limits of work. Schemas of the largest size rarely need more. One that does fails within a second."""
# Larger whole numbers are no exact floats. llguidance computes with floats, and rounds those of more digits.
_LARGEST = 1 << 53

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
_SHOWN = 80

Place = tuple[str, ...]
"""Names of fields on the way to a part of a schema, as in `("properties", "colour", "if")`."""

_PATTERNS = ("pattern", "format")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")
_PLAIN = {"$schema", "$id", "$defs", "definitions", "type", "title", "description", "default", "examples", "$comment"}
"""Keywords that change no pattern next to a combining keyword."""

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
_CALENDAR = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Patterns of RFC 3339's formats that programs can read: days of the calendar, without year 0 and leap seconds.
llguidance's own formats know neither leap years nor that a minute of 61 seconds is rare."""

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. With free white space, weak models write line ends without end."""


def checked_schema(given: object) -> dict[str, Any] | None:
    """Return a copy of a JSON schema, or None; `{}` stands for any object. Raises `UsageError`."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UsageError(
            f"schema is {format_value(given)}, expected a JSON schema as a dict, as in "
            '{"type": "object", "properties": {"colour": {"type": "string"}}}.'
        )
    copy: dict[str, Any] = json_copy("schema", dict(given), SCHEMA_BYTES) or {"type": "object"}
    _check_keywords(copy)
    _check_content(copy)
    if problem := _problem(schema_grammar(copy)):
        raise UsageError(
            f"schema is not supported: {problem}. Change the schema: docs/structured-output.md has the limits."
        )
    return copy


def _check_keywords(schema: dict[str, Any]) -> None:
    """Reject what llguidance would ignore: an old or unknown draft, and some keywords; raises `UsageError`."""
    draft = schema.get("$schema")
    known = [f"{scheme}://json-schema.org/{name}/schema" for scheme in ("http", "https") for name in _DRAFTS]
    if draft is not None and not (isinstance(draft, str) and draft.removesuffix("#") in known):
        raise UsageError(
            f"schema has $schema {format_value(draft)}, expected draft 4, 6, 7, 2019-09 or 2020-12. Leave out "
            "$schema, or write the schema for one of them."
        )
    for place, part in schema_parts((), schema):
        for name in (name for name in part if name in _IGNORED):
            raise UsageError(f"schema has a keyword{at((*place, name))} that is not supported. Leave it out.")
        if not isinstance(part.get("required", []), list):
            raise UsageError(
                f"schema has {format_value(part['required'])}{at((*place, 'required'))}, expected a list of names. "
                "Write it next to properties."
            )


def schema_parts(place: Place, schema: dict[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield a schema and all schemas in it, with their places, definitions first.

    Values such as constants are no schemas, and names of properties no keywords.
    """
    yield place, schema
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
        for names, one in inner:
            if isinstance(one, dict):
                yield from schema_parts((*place, *names), one)


def at(place: Place) -> str:
    """Return where a part of a schema is, as in " at 'properties/colour/if'"; "" for the schema itself."""
    # Quoted, and on one line. The end of a long place matters most.
    text = repr("/".join(place))
    return f" at {text if len(text) <= _SHOWN else f'{text[0]}...{text[-_SHOWN:]}'}" if place else ""


def json_copy(name: str, given: object, most_bytes: int) -> Any:
    """Return a copy of what stands for JSON of at most so many bytes; raises `UsageError`, which calls it `name`."""
    try:
        data = json.dumps(given, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} is no JSON: {error}. Give JSON values.") from error
    if len(data) > most_bytes:
        raise UsageError(f"{name} has {len(data)} bytes of JSON, expected at most {most_bytes}. Leave out parts.")
    try:
        return parsed_json(data)
    except UnreadableError as error:
        raise UsageError(f"{name} {error}. Simplify it.") from error


def read_schema(path: Path) -> dict[str, Any] | None:
    """Return the JSON schema in a file, checked; raises `UsageError`."""
    try:
        return checked_schema(read_json(path, SCHEMA_BYTES))
    except UnreadableError as error:
        raise UsageError(f"the schema '{path}' {error}. Give a JSON file of at most {SCHEMA_BYTES} bytes.") from error


def checked_regex(given: object, name: str = "regex") -> str | None:
    """Return a regular expression, or None; raises `UsageError`, which calls it `name`."""
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise UsageError(f"{name} is {format_value(given)}, expected a regular expression, as in '[0-9]+ cm'.")
    size = _utf8_bytes(name, given)
    if size > REGEX_BYTES:
        raise UsageError(f"{name} has {size} bytes, expected at most {REGEX_BYTES}. Shorten it.")
    if problem := _problem(regex_grammar(given)):
        raise UsageError(
            f"{name} cannot be used: {problem}. Correct it; look-around, back-references and \\b are not supported."
        )
    return given


def checked_choices(given: object, name: str = "choice") -> tuple[str, ...]:
    """Return the answers of a closed list as a tuple, perhaps empty; raises `UsageError`, which calls it `name`."""
    if not isinstance(given, (tuple, list)) or not all(isinstance(one, str) and one for one in given):
        raise UsageError(
            f'{name} is {format_value(given)}, expected a list of texts that are not empty, as in ["yes", "no"].'
        )
    # Only the option of the command line repeats.
    repeated = " or --choice yes --choice no" if name == "choice" else ""
    if given and not 2 <= len(set(given)) == len(given) <= MOST_CHOICES:
        raise UsageError(
            f"{name} has {counted(len(set(given)), 'different text')} of {len(given)}, expected 2 to "
            f'{MOST_CHOICES}, all different, as in ["yes", "no"]{repeated}.'
        )
    for one in given:
        size = _utf8_bytes(name, one)
        if size > CHOICE_BYTES:
            raise UsageError(f"a text of {name} has {size} bytes, expected at most {CHOICE_BYTES}. Shorten it.")
    return tuple(given)


def given_choices(given: object, name: str = "choice") -> tuple[str, ...]:
    """Return a closed list that somebody gave, as `checked_choices` does; an empty one raises `UsageError` too."""
    if isinstance(given, (tuple, list)) and not given:
        raise UsageError(f"{name} is {format_value(given)}, expected 2 texts or more. Leave it out.")
    return checked_choices(given, name)


def check_one_form(forms: Mapping[str, object], stop: object) -> None:
    """Reject more than one of the `forms` of an answer, and one of them with `stop` strings; raises `UsageError`."""
    given = [name for name, value in forms.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} were given, expected at most one form of the answer. Leave out one.")
    if given and stop:
        raise UsageError(f"{given[0]} and stop were given. A stop string would cut the answer: leave out stop.")


def schema_grammar(schema: Mapping[str, Any], lead: str = "") -> str:
    """Return llguidance's grammar of the JSON texts that a schema allows, after the text `lead`."""
    return _grammar(json_rule(schema), lead)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the part of llguidance's grammars that stands for the JSON texts that a schema allows."""
    # The schema's own options of llguidance, if any, are replaced.
    return f"%json {json.dumps({**_with_calendar(schema), 'x-guidance': _JSON_STYLE})}"


def _with_calendar(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema with patterns in the place of formats of dates and times."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for _, part in schema_parts((), copy):
        others = part.get("allOf", [])
        if isinstance(part.get("format"), str) and part["format"] in _CALENDAR and isinstance(others, list):
            part["allOf"] = [*others, {"pattern": _CALENDAR[part.pop("format")]}]
    return copy


def regex_grammar(regex: str, lead: str = "") -> str:
    """Return llguidance's grammar of the texts that match a regular expression as a whole, after the text `lead`."""
    # Digits are those of ASCII, as a program that reads the answer expects.
    return _grammar(f"/{load_llguidance().regex_to_lark(regex, 'd')}/", lead)


def load_llguidance() -> Any:
    """Return the package llguidance; raises `UsageError` where it is not installed."""
    install = f"{install_command('structured')}, or give a closed list of answers as choice."
    with needs_package("an answer by schema, regex or tools", install):
        import llguidance
    return llguidance


def reason(message: str) -> str:
    """Return the cause in an error message of llguidance, on one line."""
    causes = re.findall(r"^error: (.*)$", message, re.MULTILINE)
    first = message.strip().partition("\n")[0]
    cause = causes[-1] if causes else re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", first)
    # Later sentences name options of llguidance, and expressions in brackets are its own.
    return " ".join(cause.split()).partition(". ")[0].partition(": (And ")[0].rstrip(".")[:200]


def written_grammar(rules: str) -> str:
    """Return rules in llguidance's syntax as one of its grammars; raises `UsageError` where it is not installed."""
    return load_llguidance().LLMatcher.grammar_from_lark(rules)


def _grammar(body: str, lead: str) -> str:
    return written_grammar(f"start: {json.dumps(lead)} body\nbody: {body}" if lead else f"start: body\nbody: {body}")


def _check_content(schema: dict[str, Any]) -> None:
    """Reject numbers that llguidance would change, and patterns that it would take too long to combine."""
    left, patterns, combines, opens = list[tuple[Place, Any]]([((), schema)]), 0, False, False
    while left:
        place, part = left.pop()
        if isinstance(part, dict):
            left += [((*place, name), one) for name, one in part.items()]
            given = part.get("patternProperties")
            opens |= isinstance(given, dict)
            patterns += sum(name in part for name in _PATTERNS) + (len(given) if isinstance(given, dict) else 0)
            combines |= any(name in part for name in _COMBINING) and (
                "allOf" in part or len(part.keys() - _PLAIN) > 1
            )
        elif isinstance(part, list):
            left += [((*place, str(number)), one) for number, one in enumerate(part)]
        elif isinstance(part, (int, float)) and (abs(part) > _LARGEST or float(f"{part:.15g}") != part):
            raise UsageError(
                f"schema has the number {format_value(part)}{at(place)}, expected at most 2**53 in size and 15 "
                "digits. Round it, or use a string."
            )
    if combines and patterns > MOST_PATTERNS:
        raise UsageError(
            f"schema combines {patterns} patterns and formats, expected at most {MOST_PATTERNS} next to allOf, or "
            "next to anyOf, oneOf and $ref with other keywords. Write each pattern where it applies."
        )
    check_together([schema], combined=combines or opens)


def check_together(schemas: Sequence[dict[str, Any]], *, combined: bool = False) -> None:
    """Reject schemas whose `multipleOf` and `patternProperties` llguidance needs too much work for together.

    `combined` is whether a number may have to be a multiple of several. Raises `UsageError`.
    """
    parts = [part for schema in schemas for _, part in schema_parts((), schema)]
    names = [len(found) for part in parts if isinstance(found := part.get("patternProperties"), dict)]
    if sum(count**2 for count in names) > MOST_NAME_PATTERNS**2:
        raise UsageError(
            f"schema has {counted(sum(names), 'pattern')} of names in patternProperties, up to {max(names)} in an "
            f"object, expected at most {MOST_NAME_PATTERNS} in one object, and fewer each in several. Combine "
            "patterns, as in '^(a|b)_'."
        )
    given = [part["multipleOf"] for part in parts if "multipleOf" in part]
    # llguidance rejects others.
    sizes = [Decimal(repr(abs(one))).normalize() for one in given if type(one) in (int, float) and one]
    places = [max(0, -int(size.as_tuple().exponent)) for size in sizes]
    if max(places, default=0) > MULTIPLE_PLACES:
        raise UsageError(
            f"schema has a multipleOf with {max(places)} decimal places, expected at most {MULTIPLE_PLACES}. "
            "Leave it out, and round the number in your program."
        )
    # Where they are combined, all count in units of the last place.
    units = [int(size.scaleb(max(places) if combined else own)) for size, own in zip(sizes, places, strict=True)]
    if (least := lcm(*units)) > MOST_MULTIPLE:
        raise UsageError(
            f"schema has multipleOf with the least common multiple {format_value(least)} without decimal points, "
            f"expected at most {MOST_MULTIPLE}. Leave out large ones, and check these numbers in your program."
        )


def _problem(grammar: str) -> str:
    """Return why llguidance rejects a grammar, or an empty text."""
    library = load_llguidance()
    return reason(library.LLMatcher.validate_grammar(grammar, limits=library.LLParserLimits(**LIMITS)))


def _utf8_bytes(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is {format_value(text)}, which is not valid UTF-8.") from error
