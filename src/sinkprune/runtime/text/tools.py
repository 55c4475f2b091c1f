"""Earlier turns, and functions that an answer may call: definitions, calls, and the grammar of answers with calls.

Calls have the form of Hermes and Qwen, which their chat templates write:

    <tool_call>
    {"name": "look_up", "arguments": {"word": "sink"}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sinkprune.contract.checks import check_type, creation_checks_options, format_value
from sinkprune.contract.errors import PromptError, UsageError
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.runtime.text.answer_form import check_together, checked_schema, json_copy, json_rule, written_grammar
from sinkprune.runtime.text.answer_tokens import BEGIN, CALL_MARKS, END
from sinkprune.runtime.text.prompt import Turn, check_text
from sinkprune.runtime.text.template_places import ARGUMENTS_BEFORE, CALL_AFTER, NAME_BEFORE

# Definitions may come from network clients. Templates write them all into the prompt.
TOOLS_BYTES, MOST_TOOLS = 1 << 16, 128
ROLES = ("user", "assistant")
CHOICES = ("auto", "none", "required")
_ID_CHARACTERS = 256
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS, _ANY = {"type": "object", "properties": {}}, {"type": "object"}
_OPENING = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
"""Keywords next to which `additionalProperties` would mean something else."""
_EXAMPLE = '{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}'
# Text without a call. Where `<tool_call>` is a token, no text matches that token.
_JSON_AFTER = json.dumps(CALL_AFTER.removesuffix(END))
_TEXT = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{BEGIN}(.|\n)*/"


@creation_checks_options
@dataclass(frozen=True)
class ToolCall:
    """A call in an earlier answer."""

    id: str
    """A text of the client's choice. The result of the call has the same."""
    name: str
    arguments: Mapping[str, Any]
    """JSON values by parameter, as `json.loads` gives them."""

    def __post_init__(self) -> None:
        check_call_id(self.id)
        check_name(self.name)
        if not isinstance(self.arguments, Mapping):
            raise UsageError(
                f"the arguments of a tool call are {format_value(self.arguments)}, expected a dict, as in "
                '{"word": "sink"}. Use json.loads for a text.'
            )
        try:
            json.dumps(dict(self.arguments), allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the arguments of a tool call are no JSON: {error}. Give JSON values.") from error
        if not all(isinstance(name, str) for name in self.arguments):
            raise UsageError(
                "the arguments of a tool call have a name that is no text. Give a dict with texts as keys."
            )


@creation_checks_options
@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call, and whether it must call one."""

    functions: Sequence[Mapping[str, Any]]
    """Functions as OpenAI's clients define them: {"type": "function", "function": {"name": ..., "description": ...,
    "parameters": ...}}. `parameters` is a JSON schema of an object; without it, the function takes none."""
    choice: str = "auto"
    """`auto` allows text, calls, or text and then calls; `required` allows calls only, and `none` text only."""
    name: str | None = None
    """With `required`, the only function that may be called, once."""
    parallel: bool = True
    """Whether an answer may have several calls."""

    def __post_init__(self) -> None:
        check_type("parallel", self.parallel, (bool,), "True or False")
        given = self.functions
        if not isinstance(given, (tuple, list)) or not 0 < len(given) <= MOST_TOOLS:
            raise UsageError(f"tools is {format_value(given)}, expected 1 to {MOST_TOOLS} functions, as {_EXAMPLE}.")
        copies = json_copy("tools", given, TOOLS_BYTES)
        functions = tuple(_checked_function(one, number) for number, one in enumerate(copies))
        object.__setattr__(self, "functions", functions)
        names = [one["function"]["name"] for one in functions]
        if len(set(names)) < len(names):
            raise UsageError("tools has two functions of the same name. Name each differently.")
        check_together([one["function"].get("parameters", {}) for one in functions])
        if self.choice not in CHOICES:
            raise UsageError(f"the choice of tools is {format_value(self.choice)}, expected {', '.join(CHOICES)}.")
        if self.name is not None and self.choice != "required":
            raise UsageError(
                f"a name is given, and the choice of tools is '{self.choice}', expected 'required'. Give that choice."
            )
        if self.name is not None and self.name not in names:
            raise UsageError(
                f"the function to call is {format_value(self.name)}, expected one of tools: "
                f"{format_value(', '.join(names))}."
            )

    @property
    def may_call(self) -> bool:
        """Whether the answer may have a call."""
        return self.choice != "none"

    def grammar(self, begin: int | None, end: int | None, lead: str = "") -> str:
        """Return llguidance's grammar of the answers.

        `begin` and `end` are the tokens of `CALL_MARKS`, or None where the tokenizer has none. Answers that begin
        with a call have the text `lead` before it.
        """
        if not self.may_call:
            return written_grammar(f"start: TEXT\n{_TEXT}")
        begun, ended = (
            json.dumps(text) if token is None else f"<[{token}]>"
            for text, token in zip(CALL_MARKS, (begin, end), strict=True)
        )
        called = [one["function"] for one in self.functions if self.name in (None, one["function"]["name"])]
        more = '("\\n" call)*' if self.parallel and self.name is None else ""
        rules = [
            f"call: {begun} rest",
            f"rest: ({' | '.join(f'call_{number}' for number in range(len(called)))}) {_JSON_AFTER} {ended}",
        ]
        for number, function in enumerate(called):
            head = json.dumps(NAME_BEFORE + function["name"] + ARGUMENTS_BEFORE)
            rules.append(f"call_{number}: {head} arguments_{number}")
            rules.append(
                f"arguments_{number}: {json_rule(_closed(function.get('parameters', _NO_PARAMETERS) or _ANY))}"
            )
        if self.choice == "required":
            return written_grammar("\n".join([f"start: {json.dumps(lead) if lead else ''} call {more}", *rules]))
        before = f"before: TEXT {begun}" if begin is not None else f"before: BEFORE\nBEFORE: TEXT {begun}"
        return written_grammar("\n".join([f"start: TEXT | before rest {more}", before, _TEXT, *rules]))


def check_call_id(given: object) -> None:
    """Reject what is no id of a call; raises `UsageError`."""
    if not isinstance(given, str) or not 0 < len(given) <= _ID_CHARACTERS or not given.isprintable():
        raise UsageError(
            f"the id of a tool call is {format_value(given)}, expected 1 to {_ID_CHARACTERS} printable characters."
        )


def check_name(name: object) -> None:
    """Reject what is no name of a function; raises `UsageError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"the name of a function is {format_value(name)}, expected 1 to 64 letters, digits, '_' and '-'."
        )


def read_arguments(given: object) -> dict[str, Any]:
    """Return the arguments of a call, which are JSON in a text; raises `UsageError`. An empty text means none."""
    try:
        arguments = parsed_json((given or "{}").encode()) if isinstance(given, str) else None
    except (UnreadableError, UnicodeEncodeError) as error:
        raise UsageError(f"the arguments of a tool call are no JSON: {error}. Send those of the answer.") from error
    if not isinstance(arguments, dict):
        raise UsageError(
            f"the arguments of a tool call are {format_value(given)}, expected a text with a JSON object, as in "
            '"{\\"word\\": \\"sink\\"}".'
        )
    return arguments


def _checked_function(given: Any, number: int) -> dict[str, Any]:
    """Return a function as templates take it, without `strict`: answers always conform to the parameters."""
    match given:
        case {"type": "function", "function": {"name": name, **fields}, **others} if not others:
            check_name(name)
        case _:
            raise UsageError(f"tools[{number}] is {format_value(given)}, expected a function, as {_EXAMPLE}.")
    function = {key: value for key, value in given["function"].items() if key != "strict" and value is not None}
    for field in function.keys() - {"name", "description", "parameters"}:
        raise UsageError(f"the function {name} has the field {format_value(field)}, which is not supported.")
    if not isinstance(function.get("description", ""), str) or not isinstance(fields.get("strict") or False, bool):
        raise UsageError(f"the function {name} has a description that is no text, or a strict that is no boolean.")
    if "parameters" in function:
        try:
            schema = checked_schema(function["parameters"])
        except UsageError as error:
            raise UsageError(f"the parameters of the function {name} are wrong: {error}") from error
        if schema is None or schema.get("type") != "object":
            raise UsageError(
                f"the parameters of the function {name} are {format_value(schema)}, expected a schema with the type "
                "object."
            )
    return {"type": "function", "function": function}


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that allows only its own parameters, unless it has a rule for others."""
    if "properties" not in schema or _OPENING & schema.keys():
        return schema
    return {**schema, "additionalProperties": False}


def checked_turns(given: object) -> tuple[Turn, ...]:
    """Return turns, each given as a `Turn` or as a role with texts; raises `PromptError` and `UsageError`."""
    turns = []
    for each in given if isinstance(given, (tuple, list)) else [given]:
        turn, content = (each, each.texts) if isinstance(each, Turn) else _pair(each)
        if turn.role not in (*ROLES, "tool"):
            raise UsageError(f"history has a Turn of {format_value(turn.role)}, expected {', '.join(ROLES)} or tool.")
        texts = tuple(content) if isinstance(content, (tuple, list)) else (content,)
        if not texts:
            raise PromptError("history has a turn without texts. Give it a text; an empty one says nothing.")
        for text in texts:
            check_text("text of a turn", text)
        calls = turn.tool_calls
        if not isinstance(calls, (tuple, list)) or not all(isinstance(call, ToolCall) for call in calls):
            raise UsageError(f"tool_calls of a Turn are {format_value(calls)}, expected a tuple of ToolCall.")
        if calls and turn.role != "assistant":
            raise UsageError(
                f"history has a Turn of '{turn.role}' with tool_calls, expected them of an assistant only."
            )
        if turn.tool_call_id is not None:
            check_call_id(turn.tool_call_id)
        turns.append(replace(turn, texts=texts, tool_calls=tuple(calls)))
    return tuple(turns)


def _pair(given: object) -> tuple[Turn, object]:
    if not isinstance(given, (tuple, list)) or len(given) != 2 or given[0] not in ROLES:
        raise UsageError(
            f"history has {format_value(given)}, expected a role, which is {' or '.join(ROLES)}, with a text, as in "
            '[("user", "What is on the table?"), ("assistant", "A cup.")].'
        )
    return Turn(given[0], ()), given[1]
