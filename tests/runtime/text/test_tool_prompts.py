"""Prompts with tools, calls and results are those of transformers, and no text in them becomes a special token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sinkprune import Pipeline, PromptError
from sinkprune.runtime.text.prompt import Turn
from sinkprune.runtime.text.tools import ToolCall, Tools
from support.models.qwen_checkpoints import IMAGE_TOKEN, SPECIALS

QUESTION = "What is on the table?"
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": 'Größe & <b>Preis</b> of a "thing".',
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 12}, "most": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
CALLS = (
    ToolCall("c1", "look_up", {"word": 'a {cup}\n"é"', "most": 3, "x": [1.5, None, True, {"y": {}}]}),
    ToolCall("c2", "stop", {}),
)
RESULTS = [Turn("tool", ("A cup is red.\n",), tool_call_id="c1"), Turn("tool", ("",), tool_call_id="c2")]


@pytest.fixture(scope="module")
def pipe(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("qwen-tools", "fp32", ("prune-66.7",))


def messages_of(turns: list[Turn]) -> list[dict[str, Any]]:
    """Return turns as programs give them to transformers."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.role == "tool":
            messages.append({"role": "tool", "tool_call_id": turn.tool_call_id, "content": turn.texts[0]})
            continue
        content: list[dict[str, str]] = []
        for number, text in enumerate(turn.texts):
            content += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        messages.append({"role": turn.role, "content": content})
        if turn.tool_calls:
            messages[-1]["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.tool_calls
            ]
    return messages


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize(
    ("functions", "turns"),
    [
        ([LOOK_UP], []),
        ([LOOK_UP, STOP], []),
        ([LOOK_UP, STOP], [Turn("assistant", ("",), CALLS), *RESULTS]),
        ([STOP], [Turn("assistant", ("Let me see.",), CALLS[:1]), RESULTS[0], Turn("assistant", ("Red.",))]),
        (None, [Turn("assistant", ("",), CALLS[:1]), RESULTS[0]]),
    ],
    ids=["one", "two", "calls", "text and call", "calls without tools"],
)
def test_ids_equal_transformers(
    functions: list[dict[str, Any]] | None,
    turns: list[Turn],
    system: str | None,
    pipe: Pipeline,
    checkpoint: Callable[[str], Path],
) -> None:
    asked = [Turn("user", ("", QUESTION)), *turns]
    if asked[-1].role == "assistant":
        asked.append(Turn("user", ("And the dog?",)))
    messages = messages_of(asked)
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("qwen-tools"))
    text = tokenizer.apply_chat_template(messages, tools=functions, tokenize=False, add_generation_prompt=True)
    *history, last = asked
    tools = Tools(functions) if functions else None
    found = pipe.prompts.encode(
        last.texts, system=system, history=history, tools=tools, tool_call_id=last.tool_call_id
    )
    assert [*found.texts[0], IMAGE_TOKEN, *found.texts[1]] == tokenizer(text)["input_ids"]
    assert ("<tools>" in pipe.prompts.tokenizer.decode(found.texts[0])) == bool(functions)


def test_special_tokens_in_definitions_calls_and_results_stay_text(pipe: Pipeline) -> None:
    typed = "".join(SPECIALS.values()) + "{{ messages }}{% raw %}"
    function = {"name": "f", "description": typed, "parameters": {"type": "object", "properties": {typed: {}}}}
    history = [Turn("user", ("", QUESTION)), Turn("assistant", ("",), (ToolCall(typed, "f", {typed: [typed]}),))]

    def encoded(text: str) -> list[int]:
        tools = Tools(json.loads(json.dumps([{"type": "function", "function": function}]).replace(typed, text)))
        turns = [history[0], Turn("assistant", ("",), (ToolCall("1", "f", {text: [text]}),))]
        found = pipe.prompts.encode([text], history=turns, tools=tools, tool_call_id="1")
        return [*found.texts[0], *found.texts[1]]

    specials = [token for token in encoded(typed) if token in SPECIALS]
    assert specials == [token for token in encoded("plain") if token in SPECIALS]
    assert pipe.prompts.tokenizer.decode(encoded(typed), skip_special_tokens=False).count(typed) == 5


@pytest.mark.parametrize("name", ["gqa-112", "qwen-tied"])
def test_a_template_without_tools_is_an_error(name: str, pipeline: Callable[..., Pipeline]) -> None:
    prompts = pipeline(name).prompts
    turns = [Turn("user", ("", QUESTION)), Turn("assistant", ("",), CALLS[:1])]
    for options in ({"tools": Tools([STOP])}, {"history": turns, "tool_call_id": "c1"}):
        with pytest.raises(PromptError, match="chat template has no tools"):
            prompts.encode(["", QUESTION] if "tools" in options else ["Red."], **options)  # type: ignore[arg-type]
