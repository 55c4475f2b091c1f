"""Fields of requests' bodies, checked, and the errors about them.

By hand: pydantic would still need these checks and names, and a translation of its errors.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from sinkprune.contract.checks import WholeNumber, escaped, format_value, guessed
from sinkprune.contract.errors import (
    BudgetError,
    DeadlineError,
    ImageError,
    NewTokensError,
    PromptError,
    PruningError,
    SinkpruneError,
    ToolsError,
    UsageError,
)
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.runtime.steps.request import (
    DEADLINE_MS,
    MAX_NEW_TOKENS,
    MIN_NEW_TOKENS,
    OPTIONS_OF_LOADING,
    stop_strings,
)
from sinkprune.runtime.text.answer_form import checked_regex, checked_schema, given_choices
from sinkprune.runtime.text.answer_tokens import PENALTIES, SEED, TEMPERATURE, TOP_P

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_FILES = (errno.EMFILE, errno.ENFILE)


class ApiError(Exception):
    """A request that the server rejects, with an HTTP status and one message."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, retry: bool = False) -> None:
        """Reject with `status`. `param` is the field of the body that is wrong.

        With status 429 or `retry`, the response tells the client to try again after a second.
        """
        super().__init__(message)
        self.status, self.param = status, param
        self.headers = {"Retry-After": "1"} if retry or status == 429 else {}
        """The headers of the response."""

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


def shutting_down() -> ApiError:
    """Return the error of a request that a server did not answer before its end."""
    return ApiError("the server is shutting down. Send the request to another.", status=503)


def wrong(message: str) -> ApiError:
    """Return the error of a request whose field `messages` is wrong."""
    return ApiError(message, "messages")


def shortage(error: BaseException | None) -> ApiError | None:
    """Return the error of a request for which the machine lacks files or room on a disk; None for other errors."""
    while error is not None:
        found = error.errno if isinstance(error, OSError) else None
        if found in _NO_ROOM:
            return ApiError(
                "the server has no room for a temporary file. Send a shorter video, or have the server's temporary "
                "folder (TMPDIR) cleared.",
                status=507,
            )
        if found in _NO_FILES:
            return ApiError("the server has no free file descriptor. Try again later.", status=503, retry=True)
        error = error.__cause__
    return None


PRIORITY = WholeNumber("priority", -100, 100)
TOP_LOGPROBS = WholeNumber("top_logprobs", 0, 20)
MOST_TOKENS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
"""OpenAI's names of `max_new_tokens`, and ours; all may be given with one value."""
LEAST_TOKENS = ("min_tokens", "min_new_tokens")
"""vLLM's name of `min_new_tokens`, and ours; both may be given with one value."""
_EXAMPLE = '{"type": "object", "properties": {"colour": {"type": "string"}}}'

_SHOWN = 80


def same_json(one: object, other: object) -> bool:
    """Return whether parsed values are the same in JSON. There true is not 1, as it is in Python."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def format_json(value: object) -> str:
    """Return parsed JSON as a client writes it, on one line; long values are cut off."""
    text = escaped(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def format_field(given: Mapping[str, object], name: str) -> str:
    """Return a field's value as `format_json` does, or "missing" where an object has no such field."""
    return format_json(given[name]) if name in given else "missing"


def unsupported_field(name: str, known: Iterable[str], of_python: Mapping[str, str]) -> str:
    """Return the message for a field that is not in `known`. Fields of other names in Python are in `of_python`."""
    if name in OPTIONS_OF_LOADING:
        return f"{name} is an option of sinkprune-serve, not of a request. Start the server with --{name}."
    meant = guessed(of_python.get(name, name), sorted(known))
    return f"the field {format_json(name)} is not supported{meant or '.'} Leave it out."


def read_flag(given: Mapping[str, Any], name: str, *, default: bool = False, of: str | None = None) -> bool:
    """Return a field that is true or false, of the body or of its field `of`; raises `ApiError`."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        where = f"{of}.{name}" if of else name
        raise ApiError(f"{where} is {format_json(value)}, expected true or false.", of or name)
    return value


def read_object(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that is an object, or an empty one; raises `ApiError`."""
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise ApiError(f"{name} is {format_json(value)}, expected an object.", name)
    return value


def read_schema(given: Mapping[str, Any]) -> Any:
    """Return the JSON schema that `response_format` asks for, or None for any text; raises `ApiError`."""
    match response_format := read_object(given, "response_format"):
        case {} if "response_format" not in given:
            return None
        case {"type": "text"}:
            return None
        case {"type": "json_object" | "json_schema", "schema": schema}:
            # llama.cpp's form.
            return schema
        case {"type": "json_object"}:
            return {}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
    raise ApiError(
        f"response_format is {format_json(response_format)}, expected type text, json_object, or json_schema with "
        "json_schema.schema.",
        "response_format",
    )


def read_guided_json(given: Mapping[str, Any]) -> Any:
    """Return the field `guided_json`. A string that is JSON stands for its value, as in vLLM."""
    value = given.get("guided_json")
    try:
        return parsed_json(value.encode()) if isinstance(value, str) else value
    except UnreadableError:
        # Its check reports it.
        return value


def rejection(error: SinkpruneError, given: Mapping[str, Any]) -> ApiError:
    """Return the `ApiError` for an error of a request with the fields `given`; it names the field that is wrong."""
    for name in [name for name in given if name in _CHECKS]:
        try:
            _CHECKS[name](given[name])
        except SinkpruneError as wrong:
            # Checks of options write values as in Python.
            is_value = f"{name} is {format_value(given[name])}"
            return ApiError(str(wrong).replace(is_value, f"{name} is {format_json(given[name])}", 1), name)
    least, most = (next((name for name in names if name in given), None) for names in (LEAST_TOKENS, MOST_TOKENS))
    if least and most and given[least] > given[most]:
        return ApiError(
            f"{least} is {given[least]}, and {most} is {given[most]}. Lower {least}, or raise {most}.", least
        )
    return ApiError(str(error), field_of(error, given))


def read_either(given: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the field that has several `names`, or None; raises `ApiError` for two different values."""
    sent = {name: given[name] for name in names if name in given}
    one, *others = sent.values() or [None]
    if not all(same_json(one, other) for other in others):
        found = ", and ".join(f"{name} is {format_json(value)}" for name, value in sent.items())
        raise ApiError(f"{found}. Give one of them.", [*sent][-1])
    return one


def field_of(error: SinkpruneError, given: Container[str]) -> str | None:
    """Return the field, of those `given`, that an error of a request is about, as far as its class shows it."""
    if isinstance(error, NewTokensError):
        return next((name for name in MOST_TOKENS if name in given), None)
    if isinstance(error, ToolsError) and "tools" in given:
        return "tools"
    if isinstance(error, DeadlineError):
        return "deadline_ms"
    if isinstance(error, (PromptError, ImageError)):
        return "messages"
    return "budget" if isinstance(error, (BudgetError, PruningError)) else None


def _check_schema(schema: Any, name: str) -> None:
    if not isinstance(schema, dict):
        raise UsageError(f"{name} is {format_json(schema)}, expected a JSON schema, as in {_EXAMPLE}.")
    try:
        checked_schema(schema)
    except UsageError as error:
        raise UsageError(name + str(error).removeprefix("schema")) from error


def _check_response_format(value: Mapping[str, Any]) -> None:
    if (schema := read_schema({"response_format": value})) is not None:
        _check_schema(schema, "response_format." + ("schema" if "schema" in value else "json_schema.schema"))


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    **{name: MAX_NEW_TOKENS.named(name).check for name in MOST_TOKENS},
    **{name: MIN_NEW_TOKENS.named(name).check for name in LEAST_TOKENS},
    **{numbers.name: numbers.check for numbers in (PRIORITY, TOP_LOGPROBS, TEMPERATURE, TOP_P, SEED, DEADLINE_MS)},
    **{numbers.name: numbers.check for numbers, _ in PENALTIES},
    "stop": stop_strings,
    "response_format": _check_response_format,
    "guided_json": partial(_check_schema, name="guided_json"),
    "guided_regex": partial(checked_regex, name="guided_regex"),
    "guided_choice": partial(given_choices, name="guided_choice"),
}
