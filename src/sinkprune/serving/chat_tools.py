"""Tools in requests and responses: their definitions, calls in answers as they are written, and results."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sinkprune.contract.checks import format_value
from sinkprune.contract.errors import UsageError
from sinkprune.runtime.text.answer_tokens import StopStrings
from sinkprune.runtime.text.prompt import ARGUMENTS_BEFORE, BEGIN, CALL_AFTER, NAME_BEFORE, Turn
from sinkprune.runtime.text.tools import ToolCall, Tools, read_arguments
from sinkprune.serving.body_fields import ApiError, format_field, format_json, read_flag, wrong


class AnswerPart(NamedTuple):
    """A part of an answer: content, the start of a call, or a part of its arguments."""

    text: str
    """Content, or JSON of a call's arguments; empty at the start of a call."""
    call: int | None = None
    """The number of the call, from 0; None for content."""
    name: str = ""
    """The function's name at the start of its call."""


_CONTENT, _HEAD, _NAME = range(3)
_UNTIL = ((BEGIN, f"\n{BEGIN}"), (NAME_BEFORE,), (ARGUMENTS_BEFORE,), (CALL_AFTER,))
"""The texts that end each part: content, the head of a call, its name, and its arguments."""


class ToolAnswerReader:
    """Takes the text of an answer apart. The result does not depend on how the text is cut into pieces.

    `Tools.grammar` describes the text. A line end before a call is no content, because templates write one there.
    Arguments of a call that was cut off may be incomplete.
    """

    def __init__(self) -> None:
        self.calls = 0
        """The number of calls that have a name."""
        self._kind, self._until, self._name = _CONTENT, StopStrings(_UNTIL[_CONTENT]), ""

    def add(self, piece: str) -> list[AnswerPart]:
        """Return what `piece` adds to the answer: nothing while a text between the parts is incomplete."""
        parts: list[AnswerPart] = []
        # StopStrings drops what follows a string in the same piece.
        for character in piece:
            text = self._until.add(character)
            if self._kind == _NAME:
                self._name += text
            elif text and self._kind != _HEAD:
                call = None if self._kind == _CONTENT else self.calls - 1
                if parts and parts[-1].call == call and not parts[-1].name:
                    text = parts.pop().text + text
                parts.append(AnswerPart(text, call))
            if self._until.found:
                if self._kind == _NAME:
                    parts.append(AnswerPart("", self.calls, self._name))
                    self.calls, self._name = self.calls + 1, ""
                self._kind = (self._kind + 1) % len(_UNTIL)
                self._until = StopStrings(_UNTIL[self._kind])
        return parts

    def end(self) -> list[AnswerPart]:
        """Return the content that was held back. No text follows, and no content follows a call."""
        text = self._until.end()
        return [AnswerPart(text)] if text and self._kind == _CONTENT and not self.calls else []


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
        given, calls = message.get("tool_calls"), []
        if not isinstance(given, list | None):
            raise _wrong(f"{where}.tool_calls", format_json(given), "a list of calls")
        for one in given or ():
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
