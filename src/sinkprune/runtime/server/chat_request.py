"""The body of `/v1/chat/completions` as a request to a pipeline. Unsupported fields are rejected, never ignored.

The format is OpenAI's (https://platform.openai.com/docs/api-reference/chat/create), with further fields of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sinkprune.contract.budgets import AUTO, UNPRUNED
from sinkprune.contract.checks.format_value import format_value, type_name
from sinkprune.contract.checks.ranges import WholeNumber
from sinkprune.contract.errors import SinkpruneError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.answering import Answering
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.server.api_error import ApiError
from sinkprune.runtime.server.picture_urls import PictureReader
from sinkprune.runtime.server.tools import TOOL_FIELDS, OpenCalls, read_tools
from sinkprune.runtime.steps.request import MAX_NEW_TOKENS, Request
from sinkprune.runtime.text.answer_form import check_one_form, checked_choices, checked_regex, checked_schema
from sinkprune.runtime.text.prompt import Turn
from sinkprune.runtime.text.sampling import SEED, TOP_P

PRIORITY = WholeNumber("priority", -100, 100)
_TOP_LOGPROBS = WholeNumber("top_logprobs", 0, 20)
_MOST_MESSAGES = 256
_OPTIONS = ("temperature", "top_p", "seed", "deadline_ms", "stop", "min_new_tokens")
"""Fields that a `Request` has under the same name."""
# Fields that change nothing at these values. `...` stands for any.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "user": (...,),
    "metadata": (...,),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_OURS = ("budget", "method", "priority", "kept_tokens", "session")
_GUIDED = {"guided_json": "schema", "guided_regex": "regex", "guided_choice": "choice"}
"""vLLM's names of the forms of an answer, and ours."""
_LENGTHS = ("max_completion_tokens", "max_tokens")
"""OpenAI's names of `max_new_tokens`."""
_RENAMED: Mapping[str, Callable[[Any], object]] = {
    **{name: MAX_NEW_TOKENS.named(name).check for name in _LENGTHS},
    "guided_json": checked_schema,
    "guided_regex": partial(checked_regex, name="guided_regex"),
    "guided_choice": partial(checked_choices, name="guided_choice"),
}
"""Checks of fields whose options have other names, with messages that name the field."""
_KNOWN = {
    *("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "logprobs"),
    *("top_logprobs", "response_format", *_OPTIONS, *_OURS, *_GUIDED, *TOOL_FIELDS, *_NEUTRAL),
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked chat completion request."""

    model: str
    """The name of the model in the body, which the response repeats."""
    request: Request
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk that has `usage`."""
    logprobs: int | None
    """How many alternatives of each token the response lists; None without log probabilities."""
    priority: int
    """Requests with a larger number go first."""
    kept_tokens: bool
    """Whether the response has what became of each visual token."""
    session: bool
    """Whether the request shares work with others about the same pictures."""


def model_names(name: str, manifest: Manifest, *, auto: bool = False) -> tuple[str, ...]:
    """Return the names of the models of a bundle: `name`, and `name:BUDGET` for each budget.

    With `auto`, budget `auto` is one of them.
    """
    budgets = [UNPRUNED, *manifest.plans["sinkpruner"], *([AUTO] if auto else [])]
    return (name, *(f"{name}:{budget}" for budget in budgets))


@dataclass(frozen=True)
class ChatReader:
    """Reads bodies for one model."""

    name: str
    """The model's name. `NAME:BUDGET` chooses a budget too."""
    models: tuple[str, ...]
    """The names that requests may have in `model`."""
    budget: str
    """The budget of requests that name none."""
    answering: Answering
    """Makes and checks requests."""
    plan: Callable[[str, str], object]
    """Finds the plans of a method and a budget; raises `BudgetError`, and `UsageError` for budget `auto`."""
    pictures: PictureReader

    def read(self, body: bytes) -> ChatRequest:
        """Return the request in a body; raises `ApiError` with status 400, or 404 for an unknown model."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON ({error}). Send an object with model and messages.") from error
        if not isinstance(fields, dict):
            raise ApiError(400, f"the body is {type_name(fields)}, expected an object with model and messages.")
        given = _given(fields)
        self._check_names(given)
        model, budget = self._model(given)
        pictures, turns, system = self._messages(given.get("messages"))
        *history, last = turns
        options = {name: given[name] for name in _OPTIONS if name in given}
        for name in _LENGTHS:
            if name in given:
                options.setdefault("max_new_tokens", given[name])
        options |= {ours: given[name] for name, ours in _GUIDED.items() if name in given}
        if (schema := _schema(_object(given, "response_format"))) is not None:
            options["schema"] = schema
        if given.get("guided_choice") == []:
            # For a pipeline it stands for no list.
            raise ApiError(400, "guided_choice is [], expected 2 texts or more. Leave it out.", param="guided_choice")
        if isinstance(options.get("stop"), str):
            options["stop"] = (options["stop"],)
        if not pictures and "budget" not in given:
            # There is nothing to prune.
            budget = UNPRUNED
        method = given.get("method", "sinkpruner")
        try:
            for field, value in (("budget", budget), ("method", method)):
                if not isinstance(value, str):
                    raise UsageError(f"{field} is {format_value(value)}, expected a name.")
            self.plan(method, budget)
            forms = {**{name: name in given for name in _GUIDED}, "response_format": schema is not None}
            check_one_form(forms, options.get("stop"))
            if not options.get("temperature"):
                # Clients also send these for greedy answers, which they do not change.
                for field, numbers in (("top_p", TOP_P), ("seed", SEED)):
                    if field in options:
                        numbers.check(options.pop(field))
            request = self.answering.new_request(
                tuple(pictures),
                last.texts,
                history=history,
                tool_call_id=last.tool_call_id,
                tools=read_tools(given),
                system=system,
                budget=budget,
                method=method,
                **options,
            )
            priority = PRIORITY.check(given.get("priority", 0))
            listed = _TOP_LOGPROBS.check(given.get("top_logprobs", 0)) if _flag(given, "logprobs") else None
        except SinkpruneError as error:
            _check_renamed(given)
            raise ApiError(400, str(error)) from error
        if listed is None and "top_logprobs" in given:
            raise ApiError(400, "top_logprobs needs logprobs. Set logprobs to true.", param="top_logprobs")
        include_usage = _flag(_object(given, "stream_options"), "include_usage")
        return ChatRequest(
            model=model,
            request=request,
            stream=_flag(given, "stream"),
            include_usage=include_usage,
            logprobs=listed,
            priority=priority,
            kept_tokens=_flag(given, "kept_tokens"),
            session=_flag(given, "session", default=True),
        )

    def _check_names(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if name not in _KNOWN:
                raise ApiError(400, f"the field {format_value(name)} is not supported. Leave it out.", param=name)
            taken = _NEUTRAL.get(name, (...,))
            if ... not in taken and value not in taken:
                only = " or ".join(json.dumps(one) for one in taken)
                raise ApiError(
                    400, f"{name} is {format_value(value)}, supported is {only}. Leave it out.", param=name
                )

    def _model(self, given: Mapping[str, Any]) -> tuple[str, str]:
        """Return the model's name as given, and the budget."""
        model = given.get("model")
        if model not in self.models:
            raise ApiError(
                404,
                f"model is {format_value(model)}, the server has {', '.join(self.models)}. Name one.",
                param="model",
            )
        _, colon, named = str(model)[len(self.name) :].partition(":")
        budget = given.get("budget", named if colon else self.budget)
        if colon and budget != named:
            raise ApiError(400, f"model names the budget {named}, and budget is {format_value(budget)}. Name one.")
        return str(model), budget

    def _messages(self, given: Any) -> tuple[list[Picture], list[Turn], str | None]:
        """Return the pictures, the turns with the question last, and the system message."""
        if not isinstance(given, list) or not 0 < len(given) <= _MOST_MESSAGES:
            raise _wrong(f"messages is {format_value(given)}, expected a list of 1 to {_MOST_MESSAGES} messages.")
        pictures: list[Picture] = []
        turns: list[Turn] = []
        system: str | None = None
        calls = OpenCalls()
        for number, message in enumerate(given):
            role, where = message.get("role") if isinstance(message, dict) else None, f"messages[{number}]"
            if role == "tool":
                turns.append(calls.result(message, _text_of(message, number), where))
                continue
            calls.check_none(where)
            if role in ("system", "developer"):
                if system is not None or turns:
                    raise _wrong("messages has a system message after others. Give one, as the first message.")
                system = _text_of(message, number)
            elif role in ("user", "assistant"):
                called = calls.read(message, where) if role == "assistant" else ()
                # Clients leave out the content of calls.
                texts = self._texts({"content": ""} | _given(message) if called else message, number, pictures)
                if role == "assistant" and len(texts) > 1:
                    raise _wrong(f"{where} is the assistant's and has a picture. Pictures are the user's.")
                turns.append(Turn(role, texts, called))
            else:
                raise _wrong(f"{where} has the role {format_value(role)}, expected system, user, assistant or tool.")
        calls.check_none("the end of messages")
        if not turns or turns[-1].role not in ("user", "tool"):
            raise _wrong(
                "the last message is not the user's, and no tool's. End messages with a question or a result."
            )
        return pictures, turns, system

    def _texts(self, message: Mapping[str, Any], number: int, pictures: list[Picture]) -> tuple[str, ...]:
        """Return the texts around a message's pictures, and add these to `pictures`."""
        content = message.get("content")
        texts = [""]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, number):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts[-1] += part["text"]
            elif kind in ("image_url", "video_url"):
                url = part.get(kind)
                read = self.pictures.image if kind == "image_url" else self.pictures.video
                pictures.append(read(url.get("url") if isinstance(url, dict) else url))
                texts.append("")
            else:
                found = format_value(part)
                raise _wrong(f"messages[{number}] has {found}, expected a text, an image_url or a video_url.")
        return tuple(texts)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


def _text_of(message: Mapping[str, Any], number: int) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = _list(content, number)
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise _wrong(f"messages[{number}] is of the role {message['role']} and has more than text.")
    return "".join(part["text"] for part in parts)


def _list(content: Any, number: int) -> list[Any]:
    if not isinstance(content, list):
        raise _wrong(f"messages[{number}].content is {format_value(content)}, expected a text or a list of parts.")
    return content


def _check_renamed(given: Mapping[str, Any]) -> None:
    """Raise the `ApiError` that names the field, where the option of a wrong one has another name."""
    for name in given.keys() & _RENAMED.keys():
        try:
            _RENAMED[name](given[name])
        except SinkpruneError as error:
            raise ApiError(400, str(error), param=name) from error


def _flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is {format_value(value)}, expected true or false.", param=name)
    return value


def _object(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} is {format_value(value)}, expected an object.", param=name)
    return value


def _schema(response_format: Mapping[str, Any]) -> Any:
    """Return the JSON schema that a `response_format` asks for, or None for any text; raises `ApiError`."""
    match response_format:
        case {} if not response_format:
            return None
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
    raise ApiError(
        400,
        f"response_format is {format_value(response_format)}, expected type text, json_object, or json_schema with "
        "json_schema.schema.",
        param="response_format",
    )


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
