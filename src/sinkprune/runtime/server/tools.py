"""Tools in requests and responses: `tools`, `tool_choice`, calls and results in messages, and calls in answers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError
from sinkprune.runtime.server.api_error import ApiError, wrong
from sinkprune.runtime.server.body_fields import format_field, format_json, read_flag
from sinkprune.runtime.text.prompt import Turn
from sinkprune.runtime.text.tool_answer import AnswerPart
from sinkprune.runtime.text.tools import ToolCall, Tools, read_arguments

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


def read_tools(given: Mapping[str, Any]) -> Tools | None:
    """Return the tools of a request with the fields `given`, or None; raises `ApiError`."""
    functions, choice = given.get("tools", []), given.get("tool_choice", "auto")
    parallel = read_flag(given, "parallel_tool_calls", default=True)
    name: str | None = None
    match choice:
        case "auto" | "none" | "required":
            pass
        case {"type": "function", "function": {"name": str(called)}}:
            choice, name = "required", called
        case _:
            raise _wrong("tool_choice", format_json(choice), "auto, none, required or a function by its name")
    if functions == []:
        if choice == "required":
            raise ApiError("tool_choice needs a call, and there are no tools. Give tools.", "tool_choice")
        return None
    try:
        return Tools(functions, choice, name, parallel)
    except UsageError as error:
        raise ApiError(str(error), "tools") from error


class OpenCalls:
    """The calls of a conversation whose results have not been read yet, by their ids."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def read(self, message: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
        """Return the calls of an assistant's message, which wait for their results from now on."""
        given = message.get("tool_calls")
        given = [] if given is None else given
        if not isinstance(given, list):
            raise _wrong(f"{where}.tool_calls", format_json(given), "a list of calls")
        calls = []
        for one in given:
            match one:
                case {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}:
                    try:
                        call = ToolCall(id_, name, read_arguments(arguments))
                    except UsageError as error:
                        raise wrong(f"{where}: {error}") from error
                case _:
                    raise _wrong(
                        f"{where}.tool_calls", format_json(one), "calls with id, type function, and function"
                    )
            if call.id in self._ids:
                raise wrong(f"{where} has two tool calls of the same id. Send each once.")
            self._ids.add(call.id)
            calls.append(call)
        return tuple(calls)

    def result(self, message: Mapping[str, Any], text: str, where: str) -> Turn:
        """Return the turn of a tool's message with this `text`."""
        given = message.get("tool_call_id")
        if not isinstance(given, str) or given not in self._ids:
            found = format_field(message, "tool_call_id")
            raise _wrong(f"{where}.tool_call_id", found, "the id of a call of the assistant's message before it")
        self._ids.remove(given)
        return Turn("tool", (text,), tool_call_id=given)

    def check_none(self, where: str) -> None:
        """Reject `where`, a message or the end, as a place that calls without results precede."""
        if self._ids:
            missing = format_value(", ".join(sorted(self._ids)))
            raise wrong(
                f"{where} comes before the results of the tool calls {missing}. Send a tool message for each call."
            )


def part_delta(part: AnswerPart) -> dict[str, Any]:
    """Return the delta of a stream for a part of an answer."""
    if part.call is None:
        return {"content": part.text}
    if part.name:
        return {"tool_calls": [{"index": part.call, **_call(part.name)}]}
    return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


def message_fields(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """Return the fields of a message with the `parts` of an answer."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.name:
            calls.append(_call(part.name))
        elif part.call is not None:
            calls[part.call]["function"]["arguments"] += part.text
    content = "".join(part.text for part in parts if part.call is None)
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def _call(name: str) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": ""}}


def _wrong(name: str, found: str, expected: str) -> ApiError:
    return ApiError(f"{name} is {found}, expected {expected}.", name.partition("[")[0])
