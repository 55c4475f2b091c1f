"""Tools over HTTP: OpenAI's client and recorded requests of LangChain get calls, and wrong requests one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from PIL import Image
from tests.serving.test_chat_request import data_uri
from tests.serving.test_server import QUESTION, asked, served

from sinkprune import Pipeline
from sinkprune.runtime.text.answer_tokens import BEGIN, Sampler
from sinkprune.runtime.text.prompt import Turn
from sinkprune.runtime.text.template_places import call_text
from sinkprune.runtime.text.tools import ToolCall, Tools

BUDGET = "prune-66.7"


class LookUp(pydantic.BaseModel):
    """Look up a word."""

    word: Literal["cup", "dog"]
    most: Literal[1, 2]


LOOK_UP: Any = openai.pydantic_function_tool(LookUp, name="look_up")
PARAMETERS: dict[str, Any] = LOOK_UP["function"]["parameters"]
STOP: Any = {"type": "function", "function": {"name": "stop", "description": "Stop the robot."}}
TOOLS: list[Any] = [LOOK_UP, STOP]
NAMED: Any = {"type": "function", "function": {"name": "look_up"}}
OPTIONS: dict[str, Any] = {"model": "m", "tools": TOOLS, "max_tokens": 200}
RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("langchain_requests.jsonl").read_text(encoding="utf-8").splitlines()
]
"""What `bind_tools` and `with_structured_output` of langchain-openai 1.7.4 send; URI stands for the picture."""


@pytest.fixture(scope="module")
def pipe(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("qwen-tools", "fp32", (BUDGET,))


@pytest.fixture(scope="module")
def address(pipe: Pipeline) -> Iterator[str]:
    with served(pipe, budget=BUDGET) as address:
        yield address


@pytest.fixture(scope="module")
def small(photo: Image.Image) -> Image.Image:
    return photo.resize((128, 96))


Favour = Callable[..., int]
"""Makes the next answer begin with some texts, if its form allows them; returns their number of tokens."""


@pytest.fixture
def favour(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Favour:
    plain = Sampler.__call__

    def begin(*texts: str) -> int:
        marked = pipe.prompts.tokenizer.token_to_id
        ids = [one for text in texts for one in ([marked(text)] if text == BEGIN else pipe.prompts.answer_ids(text))]
        count = len(ids)

        def sampled(self: Sampler, logits: Any, allowed: Any = None) -> int:
            if ids:
                logits = logits.copy()
                logits[ids.pop(0)] += 1e4
            return plain(self, logits, allowed)

        monkeypatch.setattr(Sampler, "__call__", sampled)
        return count

    return begin


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_required_call(choice: Any, client: openai.OpenAI, pipe: Pipeline, small: Image.Image) -> None:
    found = client.chat.completions.create(
        messages=asked(small), tool_choice=choice, parallel_tool_calls=False, **OPTIONS
    ).choices[0]
    [call] = found.message.tool_calls or ()
    assert (found.finish_reason, found.message.content, call.type) == ("tool_calls", None, "function")
    tools = Tools(TOOLS, "required", "look_up" if choice is NAMED else None, parallel=False)
    expected = pipe.generate(small, QUESTION, budget=BUDGET, tools=tools, max_new_tokens=200)
    assert call_text(call.function.name, call.function.arguments) == expected.text
    assert call.function.name == "look_up" or choice is not NAMED
    schema = PARAMETERS if call.function.name == "look_up" else {"type": "object", "maxProperties": 0}
    jsonschema.validate(json.loads(call.function.arguments), schema)
    assert call.id.startswith("call_")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_text_without_a_call(choice: Any, client: openai.OpenAI, favour: Favour, small: Image.Image) -> None:
    favour("red <tool", *[BEGIN] * (choice == "none"))
    options = {**OPTIONS, "max_tokens": 14}
    found = client.chat.completions.create(messages=asked(small), tool_choice=choice, **options).choices[0]
    assert found.message.content is not None and found.message.content.startswith("red <tool")
    assert BEGIN not in found.message.content
    assert found.message.tool_calls is None and found.finish_reason in ("stop", "length")


def test_a_stream_is_assembled_by_openais_client(client: openai.OpenAI, favour: Favour, small: Image.Image) -> None:
    two = ["Two.\n", BEGIN, '\n{"name": "look_up", "arguments": {"word": "dog", "most": 2}}\n']
    favour(*two)
    logged = {"logprobs": True}
    whole = client.chat.completions.create(messages=asked(small), **logged, **OPTIONS)
    favour(*two)
    with client.chat.completions.stream(messages=asked(small), **logged, **OPTIONS) as stream:
        events = [*stream]
        final = stream.get_final_completion().choices[0]
    message = whole.choices[0].message
    assert (final.message.content, final.finish_reason) == (message.content, "tool_calls") == ("Two.", "tool_calls")
    # The client joins the id, type and name of a call, so they must come once.
    found, expected = (
        [(call.type, call.function.name, call.function.arguments) for call in one.tool_calls or ()]  # type: ignore[union-attr]
        for one in (final.message, message)
    )
    assert found == expected and final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.parsed_arguments == LookUp(word="dog", most=2)
    tokens = final.logprobs.content  # type: ignore[union-attr]
    assert tokens is not None and len(tokens) == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]


def test_held_back_text_comes_with_the_last_chunk(client: openai.OpenAI, favour: Favour, small: Image.Image) -> None:
    favour("Hm\n")
    chunks = client.chat.completions.create(messages=asked(small), stream=True, **{**OPTIONS, "max_tokens": 3})
    deltas = [(chunk.choices[0].delta.content, chunk.choices[0].finish_reason) for chunk in chunks]
    assert "".join(text or "" for text, _ in deltas) == "Hm\n"
    assert deltas[-1] == ("\n", "length")


def test_parse_and_a_second_turn(client: openai.OpenAI, pipe: Pipeline, small: Image.Image) -> None:
    options: dict[str, Any] = {"model": "m", "max_tokens": 100, "tools": [LOOK_UP], "parallel_tool_calls": False}
    messages = asked(small)
    parsed = client.chat.completions.parse(messages=messages, tool_choice="required", **options).choices[0].message
    [call] = parsed.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, LookUp)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "It is red."}]}
    # As a client's own objects, which have further fields.
    messages = [*messages, parsed, result]
    second = client.chat.completions.create(messages=messages, **{**options, "max_tokens": 6})
    made = ToolCall(call.id, "look_up", json.loads(call.function.arguments))
    expected = pipe.generate(
        small,
        "It is red.",
        budget=BUDGET,
        history=[Turn("user", ("", QUESTION)), Turn("assistant", ("",), (made,))],
        tool_call_id=call.id,
        tools=Tools([LOOK_UP], parallel=False),
        max_new_tokens=6,
    )
    assert second.choices[0].message.content == expected.text
    assert second.model_extra["sinkprune"]["reused_rows"] > expected.tokens_per_layer[0]  # type: ignore[index]
    # A question after the result, without tools.
    further = [*messages, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "Sure?"}]
    found = client.chat.completions.create(model="m", messages=further, max_tokens=4)
    assert found.choices[0].message.content


def test_a_call_that_is_cut_off(client: openai.OpenAI, favour: Favour, small: Image.Image) -> None:
    count = favour(BEGIN, '\n{"name": "look_up", "arguments": {"word": "cup", ')
    options = {**OPTIONS, "max_tokens": count, "tool_choice": NAMED}
    found = client.chat.completions.create(messages=asked(small), **options).choices[0]
    [call] = found.message.tool_calls or ()
    assert found.finish_reason == "length" and call.type == "function"
    assert call.function.arguments.startswith('{"word": "cup"')
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


def test_a_template_without_tools_is_a_400(pipeline: Callable[..., Pipeline], small: Image.Image) -> None:
    with served(pipeline("qwen-tied"), budget="none") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for choice in ("auto", "none", "required"):
            with pytest.raises(openai.BadRequestError, match="the model's chat template has no tools"):
                client.chat.completions.create(messages=asked(small), tool_choice=choice, **OPTIONS)


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_a_request_of_langchain(number: int, client: openai.OpenAI, small: Image.Image) -> None:
    body = json.loads(json.dumps(RECORDED[number]).replace('"URI"', json.dumps(data_uri(small))))
    if "response_format" not in body and body.get("tool_choice", "auto") in ("auto", "none"):
        body["max_completion_tokens"] = 4
    # A stream is assembled in another test.
    choice = client.chat.completions.create(**{**body, "stream": False, "stream_options": None}).choices[0]
    content, calls = choice.message.content, choice.message.tool_calls
    if "response_format" in body:
        schema = body["response_format"].get("json_schema", {}).get("schema", {"type": "object"})
        if choice.finish_reason == "length":
            # Random weights may write a text without an end.
            assert content and content.startswith("{") and schema == {"type": "object"}
        else:
            jsonschema.validate(json.loads(content or ""), schema)
    elif body.get("tool_choice", "auto") in ("auto", "none"):
        assert content and not calls
    else:
        assert choice.finish_reason == "tool_calls" and calls
        for call in calls:
            assert call.type == "function" and call.function.name == body["tools"][0]["function"]["name"]
            jsonschema.validate(json.loads(call.function.arguments), body["tools"][0]["function"]["parameters"])
