"""The body of `/v1/chat/completions` as a request to a pipeline. Unsupported fields are rejected, never ignored.

The format is OpenAI's (https://platform.openai.com/docs/api-reference/chat/create), with further fields of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import RealNumber, WholeNumber, format_value, unknown_name
from sinkprune.contract.errors import SinkpruneError, UsageError
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.media.image_bytes import ImageBytes
from sinkprune.runtime.media.video_file import VideoBytes
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.context_length import check_picture_count
from sinkprune.runtime.steps.request import Request, choice_note, greedy_note
from sinkprune.runtime.text.answer_form import check_one_form
from sinkprune.runtime.text.answer_tokens import PENALTIES, SEED, TOP_P
from sinkprune.runtime.text.prompt import Text, Turn
from sinkprune.runtime.text.tools import ToolCall, Tools, read_arguments
from sinkprune.serving.body_fields import (
    LEAST_TOKENS,
    MOST_TOKENS,
    PRIORITY,
    TOP_LOGPROBS,
    ApiError,
    format_field,
    format_json,
    read_either,
    read_flag,
    read_guided_json,
    read_object,
    read_schema,
    rejection,
    same_json,
    unsupported_field,
    wrong,
)
from sinkprune.serving.picture_urls import PictureReader

_MOST_MESSAGES = 256
_MOST_VALUES = 1 << 18
"""The most values of JSON in a body: an empty object of 3 bytes takes 72 as Python's. Values are counted by
their commas, also those in texts."""
_OPTIONS = ("temperature", "top_p", "seed", "deadline_ms", "stop", *(penalty.name for penalty, _ in PENALTIES))
"""Fields that a `Request` has under the same name."""
# Fields that change nothing at these values. `...` stands for any.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "metadata"), (...,)),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_OF_ROLE = {"assistant": "tool_calls", "tool": "tool_call_id"}
"""The further keys of messages. Templates have no place for `name`."""
_EMPTY = ("refusal", "audio", "function_call", "annotations", "tool_calls", "tool_call_id")
"""Keys that clients send back empty, with an assistant's message that they received."""
_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_OURS = ("budget", "method", "priority", "kept_tokens", "session")
_GUIDED = {"guided_json": "schema", "guided_regex": "regex", "guided_choice": "choice"}
"""vLLM's names of the forms of an answer, and ours."""
_OF_PYTHON = {ours: name for name, ours in _GUIDED.items()}
_KNOWN = {
    *("model", "messages", "stream", "stream_options", "logprobs", "top_logprobs", "response_format"),
    *(*_OPTIONS, *MOST_TOKENS, *LEAST_TOKENS, *_OURS, *_GUIDED, *_TOOL_FIELDS, *_NEUTRAL),
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked chat completion request."""

    model: str
    """The name of the model in the body, which the response repeats."""
    fields: frozenset[str]
    """The names of the fields in the body."""
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
    notes: tuple[str, ...]
    """Sentences about fields that change nothing."""


def model_names(name: str, manifest: Manifest, method: str) -> tuple[str, ...]:
    """Return the names of the models of a bundle: `name`, and `name:BUDGET` for each budget of `method`."""
    return (name, *(f"{name}:{budget}" for budget in (UNPRUNED, *manifest.plans[method])))


@dataclass(frozen=True)
class ChatReader:
    """Reads bodies for one model."""

    name: str
    """The model's name. `NAME:BUDGET` chooses a budget too."""
    budget: str
    """The budget of requests that name none."""
    method: str
    """The method of requests that name none."""
    pipeline: Pipeline
    pictures: PictureReader

    @property
    def models(self) -> tuple[str, ...]:
        """The names that requests may have in `model`."""
        return model_names(self.name, self.pipeline.bundle.manifest, self.method)

    def read(self, body: bytes | bytearray) -> ChatRequest:
        """Return the request in a body; raises `ApiError` with status 400, or 404 for an unknown model.

        Pictures are not decoded yet.
        """
        if body.count(b",") > _MOST_VALUES:
            raise ApiError(f"the body has more than {_MOST_VALUES} values. Send a shorter conversation.")
        try:
            fields = parsed_json(body)
        except UnreadableError as error:
            raise ApiError(f"the body {error}. Send JSON: an object with model and messages.") from error
        if not isinstance(fields, dict):
            raise ApiError(f"the body is {format_json(fields)}, expected an object with model and messages.")
        given = _given(fields)
        self._check_names(given)
        model, budget = self._model(given)
        pictures, turns, system = self._messages(given)
        *history, last = turns
        options = {name: given[name] for name in _OPTIONS if name in given}
        for option, names in (("max_new_tokens", MOST_TOKENS), ("min_new_tokens", LEAST_TOKENS)):
            if (sent := read_either(given, names)) is not None:
                options[option] = sent
        if "guided_json" in given:
            given["guided_json"] = read_guided_json(given)
        options |= {ours: given[name] for name, ours in _GUIDED.items() if name in given}
        unused, unscored = list[str](), list[str]()
        if (schema := read_schema(given)) is not None:
            options["schema"] = schema
        if not pictures and "budget" not in given:
            # There is nothing to prune.
            budget = UNPRUNED
        method = given.get("method", self.method)
        for field, value, planned in (("method", method, UNPRUNED), ("budget", budget, budget)):
            if not isinstance(value, str):
                raise ApiError(f"{field} is {format_json(value)}, expected a name.", field)
            try:
                self.pipeline.bundle.manifest.plan(method, planned)
            except SinkpruneError as error:
                raise ApiError(str(error), field) from error
        try:
            forms = {**{name: name in given for name in _GUIDED}, "response_format": schema is not None}
            tools = _read_tools(given)
            check_one_form({**forms, "tools": tools is not None and tools.may_call}, options.get("stop"))
            if not options.get("temperature"):
                # Clients also send these for greedy answers, which they do not change.
                unused = _take_unused(options, ((TOP_P, 1), (SEED, None)))
            if options.get("choice"):
                unscored = [name for name in (*MOST_TOKENS, *LEAST_TOKENS) if name in given]
                unscored += _take_unused(options, PENALTIES)
            request = self.pipeline.new_request(
                tuple(pictures),
                last.texts,
                history=history,
                tool_call_id=last.tool_call_id,
                tools=tools,
                system=system,
                budget=budget,
                method=method,
                **options,
            )
            priority = PRIORITY.check(given.get("priority", 0))
            listed = TOP_LOGPROBS.check(given.get("top_logprobs", 0)) if read_flag(given, "logprobs") else None
        except SinkpruneError as error:
            raise rejection(error, given) from error
        if listed is None and "top_logprobs" in given:
            raise ApiError("top_logprobs needs logprobs. Set logprobs to true.", "top_logprobs")
        streamed = read_object(given, "stream_options")
        for name, value in streamed.items():
            if name != "include_usage" and value:
                raise ApiError(
                    f"stream_options has {format_json(name)}, which is not supported. Leave it out.", "stream_options"
                )
        return ChatRequest(
            model=model,
            fields=frozenset(given),
            request=request,
            stream=read_flag(given, "stream"),
            include_usage=read_flag(streamed, "include_usage", of="stream_options"),
            logprobs=listed,
            priority=priority,
            kept_tokens=read_flag(given, "kept_tokens"),
            session=read_flag(given, "session", default=True),
            notes=tuple(note(names) for note, names in ((greedy_note, unused), (choice_note, unscored)) if names),
        )

    def check_model(self, name: object) -> None:
        """Raise `ApiError` with status 404 for a name that is no model's."""
        if name not in self.models:
            raise ApiError(
                unknown_name(f"model is {format_json(name)}", name, self.models, "The server has") + " Name one.",
                "model",
                status=404,
            )

    def _check_names(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if name not in _KNOWN:
                raise ApiError(unsupported_field(name, _KNOWN, _OF_PYTHON), name)
            taken = _NEUTRAL.get(name, (...,))
            if ... not in taken and not any(same_json(value, one) for one in taken):
                only = " or ".join(json.dumps(one) for one in taken)
                raise ApiError(f"{name} is {format_json(value)}, supported is {only}. Leave it out.", name)

    def _model(self, given: Mapping[str, Any]) -> tuple[str, str]:
        model = given.get("model")
        if model is None:
            raise ApiError(f"model is missing, the server has {', '.join(self.models)}. Name one.", "model")
        self.check_model(model)
        _, colon, named = str(model)[len(self.name) :].partition(":")
        budget = given.get("budget", named if colon else self.budget)
        if colon and budget != named:
            raise ApiError(
                f"model names the budget {named}, and budget is {format_json(budget)}. Name one.", "budget"
            )
        return str(model), budget

    def _messages(self, given: Mapping[str, Any]) -> tuple[list[ImageBytes | VideoBytes], list[Turn], Text | None]:
        """Return the pictures, the turns with the question last, and the system message."""
        messages = given.get("messages")
        if not isinstance(messages, list) or not 0 < len(messages) <= _MOST_MESSAGES:
            found = format_field(given, "messages")
            raise wrong(f"messages is {found}, expected an array of 1 to {_MOST_MESSAGES} messages.")
        try:
            contents = [message.get("content") for message in messages if isinstance(message, dict)]
            parts = [part for content in contents if isinstance(content, list) for part in content]
            check_picture_count(self.pipeline.bundle.manifest, self.pipeline.limits, sum(map(_is_picture, parts)))
        except SinkpruneError as error:
            raise wrong(str(error)) from error
        pictures: list[ImageBytes | VideoBytes] = []
        turns: list[Turn] = []
        system: Text | None = None
        calls = _OpenCalls()
        for number, message in enumerate(messages):
            where = f"messages[{number}]"
            if not isinstance(message, dict):
                raise wrong(f"{where} is {format_json(message)}, expected an object with role and content.")
            role = message.get("role")
            _check_keys(message, where)
            if role == "tool":
                turns.append(calls.result(message, "".join(self._texts(message, where, pictures)[0]), where))
                continue
            calls.check_none(where)
            if role in ("system", "developer"):
                if system is not None or turns:
                    raise wrong("messages has a system message after others. Give one, as the first message.")
                system = self._texts(message, where, pictures)[0]
            elif role in ("user", "assistant"):
                called = calls.read(message, where) if role == "assistant" else ()
                # Clients leave out the content of calls.
                texts = self._texts({"content": ""} | _given(message) if called else message, where, pictures)
                turns.append(Turn(role, texts, called))
            else:
                found = format_field(message, "role")
                raise wrong(f"{where}.role is {found}, expected system, user, assistant or tool.")
        calls.check_none("the end of messages")
        if not turns or turns[-1].role not in ("user", "tool"):
            raise wrong(
                "the last message is not the user's, and no tool's. End messages with a question or a result."
            )
        return pictures, turns, system

    def _texts(
        self, message: Mapping[str, Any], where: str, pictures: list[ImageBytes | VideoBytes]
    ) -> tuple[Text, ...]:
        """Return the texts around a message's pictures, and add these to `pictures`; raises `ApiError`."""
        content, role, texts = message.get("content"), message.get("role"), [list[str]()]
        if isinstance(content, str):
            return (content,)
        if not isinstance(content, list):
            found = format_field(message, "content")
            raise wrong(f"{where}.content is {found}, expected a string or an array of parts.")
        for number, part in enumerate(content):
            place, kind = f"{where}.content[{number}]", part.get("type") if isinstance(part, dict) else None
            text = part.get("text") if isinstance(part, dict) else None
            # Some clients leave out the type where a text is all that there can be.
            if isinstance(text, str) and (kind == "text" or (kind is None and role not in ("user", "assistant"))):
                texts[-1].append(text)
            elif _is_picture(part) and role != "user":
                found = format_json(part)
                raise wrong(f"{place} is {found}, expected a text: the role is {role}, and pictures are the user's.")
            elif _is_picture(part):
                url = part.get(kind)
                read = self.pictures.image if kind == "image_url" else self.pictures.video
                try:
                    pictures.append(read(url.get("url") if isinstance(url, dict) else url, place))
                except ApiError as error:
                    if error.status != 400:
                        # The server ends, or lacks room: the request is not wrong.
                        raise
                    raise wrong(f"{place}: {error}") from error
                texts.append([])
            else:
                raise wrong(f"{place} is {format_json(part)}, expected a text, an image_url or a video_url.")
        return tuple(map(tuple, texts))


def _read_tools(given: Mapping[str, Any]) -> Tools | None:
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
            raise _unexpected("tool_choice", format_json(choice), "auto, none, required or a function by its name")
    if functions == []:
        if choice == "required":
            raise ApiError("tool_choice needs a call, and there are no tools. Give tools.", "tool_choice")
        return None
    try:
        return Tools(functions, choice, name, parallel)
    except UsageError as error:
        raise ApiError(str(error), "tools") from error


class _OpenCalls:
    """The calls of a conversation whose results have not been read yet, by their ids."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def read(self, message: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
        """Return the calls of an assistant's message, which wait for their results from now on."""
        given, calls = message.get("tool_calls"), []
        if not isinstance(given, list | None):
            raise _unexpected(f"{where}.tool_calls", format_json(given), "a list of calls")
        for one in given or ():
            match one:
                case {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}:
                    try:
                        call = ToolCall(id_, name, read_arguments(arguments))
                    except UsageError as error:
                        raise wrong(f"{where}: {error}") from error
                case _:
                    raise _unexpected(
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
            raise _unexpected(f"{where}.tool_call_id", found, "the id of a call of the assistant's message before it")
        self._ids.remove(given)
        return Turn("tool", (text,), tool_call_id=given)

    def check_none(self, where: str) -> None:
        """Reject `where`, a message or the end, as a place that calls without results precede."""
        if self._ids:
            missing = format_value(", ".join(sorted(self._ids)))
            raise wrong(
                f"{where} comes before the results of the tool calls {missing}. Send a tool message for each call."
            )


def _take_unused(options: dict[str, Any], unused: Iterable[tuple[RealNumber | WholeNumber, object]]) -> list[str]:
    """Check and remove `options` that change nothing; return the names of those that are not at their defaults."""
    return [
        numbers.name
        for numbers, default in unused
        if numbers.name in options and numbers.check(options.pop(numbers.name)) != default
    ]


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _check_keys(message: Mapping[str, Any], where: str) -> None:
    own = {"role", "content", "name", _OF_ROLE.get(str(message.get("role")))}
    content = message.get("content")
    if isinstance(content, list) and any(isinstance(part, dict) and "image_url" in part for part in content):
        # bob_llm keeps its own key next to the part that it made of it.
        own.add("image_url")
    for name, value in message.items():
        if not (name in own or value is None or (name in _EMPTY and value in ("", [], {}))):
            what = f"{where}.{name}" if name.isidentifier() else f"the key {format_json(name)} of {where}"
            raise wrong(f"{what} is not supported. Leave it out.")


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image_url", "video_url")


def _unexpected(name: str, found: str, expected: str) -> ApiError:
    return ApiError(f"{name} is {found}, expected {expected}.", name.partition("[")[0])
