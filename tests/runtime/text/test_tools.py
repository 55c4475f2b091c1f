"""Tools: definitions, prompts with them, answers of random logits that call them, and these answers taken apart.

Prompts are those of transformers, and no text in them becomes a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from sinkprune import Pipeline, PromptError, UsageError
from sinkprune.contract.manifest import Tokens
from sinkprune.runtime.text.answer_tokens import BEGIN, CALL_MARKS, Sampler
from sinkprune.runtime.text.prompt import PromptEncoder, Turn
from sinkprune.runtime.text.template_places import call_text
from sinkprune.runtime.text.tools import ToolCall, Tools, read_arguments
from sinkprune.serving.forms import Grammars
from sinkprune.serving.responses import AnswerPart, ToolAnswerReader
from support.models.qwen_checkpoints import IMAGE_TOKEN, SPECIALS, qwen_tokenizer
from support.references.prompt_encoders import STOP, VOCABULARY, answer_encoder, random_answer

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "pattern": "^[a-z}<\\n]{0,4}$"},
        "least": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["word"],
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"look_up": {**PARAMETERS, "additionalProperties": False}, "look": NOTHING, "stop": NOTHING}


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


LOOK_UP = function("look_up", description='Größe & <b>Preis</b> of a "thing".', parameters=PARAMETERS)
LOOK = function("look", parameters={"type": "object", "properties": {}})
HALT = function("stop")
FUNCTIONS = [LOOK_UP, LOOK, function("stop", strict=True)]


def encoder_with_marks(special: bool, template: bytes = b"") -> PromptEncoder:
    """An encoder whose tokenizer has a token for each mark of calls."""
    backend = qwen_tokenizer().backend_tokenizer
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in CALL_MARKS])
    return PromptEncoder(backend.to_str().encode(), template, Tokens(IMAGE_TOKEN, STOP["qwen"], "", "<|im_end|>"))


KINDS = ("pocket", "qwen", "llama", "marks", "special marks")
ENCODERS = {kind: answer_encoder(kind) for kind in KINDS[:3]}
ENCODERS |= {kind: encoder_with_marks(kind == "special marks") for kind in KINDS[3:]}
STOPS = {kind: STOP.get(kind, STOP["qwen"]) for kind in KINDS}
GRAMMARS = {kind: Grammars(ENCODERS[kind], STOPS[kind]) for kind in KINDS}


def answer(kind: str, tools: Tools, seed: int, wanted: str = "", most: int = 400) -> tuple[str, bool]:
    """Return the text of random logits that favour the tokens of `wanted`, in order, and whether it ended."""
    constraint = GRAMMARS[kind].constraint(None, None, 0, tools)
    encoder, favoured = ENCODERS[kind], list[int]()
    # A model writes a mark as one token, where it has one.
    has_marks = encoder.tokenizer.token_to_id(BEGIN) is not None
    for part in filter(None, re.split("(</?tool_call>)", wanted) if has_marks else [wanted]):
        is_mark = has_marks and part in CALL_MARKS
        favoured += [encoder.tokenizer.token_to_id(part)] if is_mark else encoder.answer_ids(part)
    text, _, ended = random_answer(encoder, STOPS[kind], constraint, Sampler(), seed, most, favoured)
    return text, ended


def apart(text: str, cuts: Sequence[int] = ()) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content of an answer that comes in pieces, and its calls with their arguments."""
    reader, parts = ToolAnswerReader(), list[AnswerPart]()
    for start, end in pairwise([0, *cuts, len(text)]):
        parts += reader.add(text[start:end])
    parts += reader.end()
    calls = list[tuple[str, Any]]()
    for number in range(sum(bool(part.name) for part in parts)):
        # The name comes first, and alone.
        first, *others = (part for part in parts if part.call == number)
        assert first.name and not first.text and not any(part.name for part in others)
        calls.append((first.name, json.loads("".join(part.text for part in others))))
    return "".join(part.text for part in parts if part.call is None), calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_answer_is_calls(kind: str, parallel: bool) -> None:
    ended = 0
    for seed in range(12):
        text, end = answer(kind, Tools(FUNCTIONS, "required", parallel=parallel), seed)
        if not end:
            continue
        content, calls = apart(text)
        assert content == "" and calls
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        # The template's own form, as JSON in the style of json.dumps.
        assert text == "\n".join(call_text(name, json.dumps(given, ensure_ascii=False)) for name, given in calls)
        ended += 1
    assert ended > 6
    for name in ("look", "stop"):
        assert answer(kind, Tools(FUNCTIONS, "required", name), 0) == (call_text(name, "{}"), True)
    two = f"{call_text('look', '{}')}\n{call_text('stop', '{}')}"
    assert answer(kind, Tools(FUNCTIONS, "required", parallel=parallel), 0, two)[0].startswith(two) == parallel
    # In an automatic answer too.
    assert answer(kind, Tools(FUNCTIONS, parallel=parallel), 0, two)[0].startswith(two) == parallel


@pytest.mark.parametrize("kind", KINDS)
def test_an_automatic_answer_is_text_and_then_a_call_that_is_constrained(kind: str) -> None:
    for seed in range(6):
        wanted = ["red\n", "red", ""][seed % 3]
        text, end = answer(kind, Tools(FUNCTIONS), seed, f"{wanted}{BEGIN}")
        assert text.startswith(f"{wanted}{BEGIN}\n")
        if end:
            content, calls = apart(text)
            assert content == wanted.removesuffix("\n")
            assert calls and all(jsonschema.validate(given, SCHEMAS[name]) is None for name, given in calls)
        text, _ = answer(kind, Tools(FUNCTIONS), seed, "red <tool", most=30)
        assert text.startswith("red <tool") and apart(text) == (text, [])
        text, _ = answer(kind, Tools(FUNCTIONS, "none"), seed, f"red {BEGIN}", most=30)
        assert text.startswith("red") and BEGIN not in text and apart(text) == (text, [])


@pytest.mark.parametrize("kind", ["marks", "special marks"])
def test_a_mark_that_is_a_token_is_never_letters(kind: str) -> None:
    """Letters would be taken for a call that nothing constrains."""
    tokenizer, constraint = ENCODERS[kind].tokenizer, GRAMMARS[kind].constraint(None, None, 0, Tools(FUNCTIONS))
    for letter in "<tool_call":
        token = tokenizer.token_to_id(letter)
        assert constraint.allowed(VOCABULARY)[token]  # type: ignore[index]
        constraint.accept(token)
    assert not constraint.allowed(VOCABULARY)[tokenizer.token_to_id(">")]  # type: ignore[index]


@pytest.mark.parametrize("special", [True, False])
def test_special_marks_are_no_text_of_prompts(special: bool) -> None:
    encoder = encoder_with_marks(special)
    token = encoder.tokenizer.token_to_id(BEGIN)
    assert encoder.tokenizer.decode([token]) == BEGIN
    assert token not in encoder.special_ids
    typed = encoder_with_marks(special, b"{{ messages[0]['content'][0]['text'] }}")
    # As in transformers, what a user types becomes the token only if the token is not special.
    assert (token in typed.encode([f"a {BEGIN}"]).texts[0]) != special


TEXTS = st.text(st.sampled_from('ab<>"\\\n}{/_ é😀'), max_size=6) | st.sampled_from(["</tool_call>", BEGIN, "}\n"])
ARGUMENTS = st.dictionaries(TEXTS, TEXTS | st.integers() | st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=3)


@settings(max_examples=150)
@given(
    content=TEXTS.filter(lambda text: BEGIN not in text),
    calls=st.lists(st.tuples(st.sampled_from(["f", "name", "a-b_C9"]), ARGUMENTS), max_size=3),
    data=st.data(),
)
def test_an_answer_is_taken_apart_however_it_is_cut(
    content: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    written = [call_text(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    text = "\n".join([content, *written]) if content else "\n".join(written)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert apart(text) == apart(text, sorted(cuts)) == (content, calls)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "1 to 128 functions"),
        ([LOOK] * 129, "1 to 128 functions"),
        ([3], r"tools\[0\] is 3"),
        ([function("f" * 65)], "letters, digits"),
        ([function("f\n")], "letters, digits"),
        ([LOOK] * 2, "two functions of the same name"),
        ([function(examples=[])], "field 'examples', which is not supported"),
        ([function(description=3)], "description that is no text"),
        ([function(strict="yes")], "strict that is no boolean"),
        ([function(parameters=[])], r"parameters of the function f are wrong: schema is \[\]"),
        ([function(parameters={"properties": {}})], "expected a schema with the type object"),
        ([function(parameters={"type": "object", "not": {}})], "parameters of the function f .* not supported"),
        ([function(description="a" * (1 << 16))], "bytes of JSON, expected at most 65536"),
        ([function(description="\ud800")], "surrogate"),
        ([function(description=float("nan"))], "no JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_definitions(functions: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Tools(functions)


def test_other_wrong_values() -> None:
    for options in ({"choice": "any"}, {"choice": "auto", "name": "stop"}, {"choice": "required", "name": "go"}):
        with pytest.raises(UsageError, match="expected"):
            Tools(FUNCTIONS, **options)
    with pytest.raises(TypeError, match="parallel is 'no', expected True or False"):
        Tools(FUNCTIONS, parallel="no")  # type: ignore[arg-type]
    for identity, name, message in (("", "f", "id of a tool call"), ("1", 'f", "x', "letters, digits")):
        with pytest.raises(UsageError, match=message):
            ToolCall(identity, name, {})
    for wrong in ('{"x": 1}', None, {1: 2}, {"a": {1}}, {"a": float("nan")}, {"a": "\ud800"}):
        with pytest.raises(UsageError, match="the arguments of a tool call"):
            ToolCall("1", "f", wrong)  # type: ignore[arg-type]
    for arguments in ("[]", "{", "NaN", '{"a": "\\ud800"}', "\ud800", None, "[" * 5000):
        with pytest.raises(UsageError, match="arguments of a tool call"):
            read_arguments(arguments)
    assert read_arguments("") == {} and read_arguments(' {"a": [1]}\n') == {"a": [1]}


def test_parameters_are_the_functions_own() -> None:
    """Other parameters are allowed only where the schema names a rule for them."""
    wanted = call_text("f", '{"b": 1}')
    for extra, allowed in (({}, False), ({"additionalProperties": {"type": "integer"}}, True)):
        parameters = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}, **extra}
        text, _ = answer("marks", Tools([function(parameters=parameters)], "required", "f"), 0, wanted)
        assert (text.startswith(wanted[:-12])) == allowed


QUESTION = "What is on the table?"
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
        content: list[dict[str, str]] = []
        for number, text in enumerate(turn.texts):
            content += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
        messages.append({"role": turn.role, "content": content, "tool_call_id": turn.tool_call_id})
        messages[-1] |= {"tool_calls": calls} if calls else {}
    return messages


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize(
    ("functions", "turns"),
    [
        ([LOOK_UP], []),
        ([LOOK_UP, HALT], []),
        ([LOOK_UP, HALT], [Turn("assistant", ("",), CALLS), *RESULTS]),
        ([HALT], [Turn("assistant", ("Let me see.",), CALLS[:1]), RESULTS[0], Turn("assistant", ("Red.",))]),
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

    def encoded(text: str) -> list[int]:
        tools = Tools([function(description=text, parameters={"type": "object", "properties": {text: {}}})])
        turns = [Turn("user", ("", QUESTION)), Turn("assistant", ("",), (ToolCall("1", "f", {text: [text]}),))]
        found = pipe.prompts.encode([text], history=turns, tools=tools, tool_call_id="1")
        return [*found.texts[0], *found.texts[1]]

    specials = [token for token in encoded(typed) if token in SPECIALS]
    assert specials == [token for token in encoded("plain") if token in SPECIALS]
    assert pipe.prompts.tokenizer.decode(encoded(typed), skip_special_tokens=False).count(typed) == 5


def test_calls_without_a_place_in_the_template_are_an_error(pipeline: Callable[..., Pipeline]) -> None:
    turns = [Turn("user", ("", QUESTION)), Turn("assistant", ("",), CALLS[:1])]
    with pytest.raises(PromptError, match="chat template has no tools"):
        pipeline("qwen-tied").prompts.encode(["Red."], history=turns, tool_call_id="c1")
