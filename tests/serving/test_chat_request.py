"""Bodies of `/v1/chat/completions`: what they ask for, and one sentence for what is wrong."""

from __future__ import annotations

import io
import json
from base64 import b64encode, encodebytes, urlsafe_b64encode
from collections.abc import Callable
from itertools import combinations
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import DeadlineError, NewTokensError, PromptError, ToolsError
from sinkprune.serving.body_fields import ApiError, field_of
from sinkprune.serving.chat_request import ChatReader, ChatRequest
from sinkprune.serving.picture_urls import PictureReader, data_uri_bytes

# Less deep than Python's own limit, which later code would reach.
DEEP = (
    b'{"model": "m", "temperature": ' + b"[" * 950 + b"]" * 950 + b', "messages": [{"role": "user", "content": "x"}]}'
)
SURROGATE = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'
TEXT = {"type": "text", "text": "What is this?"}


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def as_uri(data: bytes) -> str:
    return "data:image/png;base64," + b64encode(data).decode()


def data_uri(image: Image.Image) -> str:
    return as_uri(png(image))


URI = data_uri(Image.new("RGB", (8, 6), "red"))
PICTURE = {"type": "image_url", "image_url": {"url": URI}}
DAMAGED = {"type": "image_url", "image_url": {"url": as_uri(png(Image.new("RGB", (800, 600), "red"))[:-40])}}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": [PICTURE, TEXT]}]}


@pytest.fixture(scope="module")
def reader(pipeline: Callable[..., Pipeline]) -> ChatReader:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",), max_images=3)
    return ChatReader("m", "retain-64", "sinkpruner", pipe, PictureReader(pipe.family, None))


def read(reader: ChatReader, **changes: Any) -> ChatRequest:
    return reader.read(json.dumps({**BODY, **changes}).encode())


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def messages(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_the_defaults(reader: ChatReader) -> None:
    found = read(reader)
    assert (found.stream, found.include_usage, found.logprobs, found.priority) == (False, False, None, 0)
    assert (found.model, found.kept_tokens, found.session) == ("m", False, True)
    request = found.request
    assert (request.texts, request.budget, request.method) == (((), ("What is this?",)), "retain-64", "sinkpruner")
    assert (request.temperature, request.top_p, request.seed, request.stop) == (0, 1, None, ())
    assert request.pictures[0].decoded().getpixel((0, 0)) == (255, 0, 0)  # type: ignore[union-attr]
    # Without pictures there is nothing to prune.
    assert read(reader, messages=messages(("user", "Hello?"))).request.budget == "none"


def test_every_field_arrives(reader: ChatReader) -> None:
    found = read(
        reader,
        model="m:none",
        temperature=0.5,
        top_p=0.9,
        seed=4,
        max_completion_tokens=9,
        max_tokens=9,
        stop=["a", "b"],
        min_tokens=3,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        logprobs=True,
        top_logprobs=3,
        priority=-2,
        kept_tokens=True,
        session=False,
        deadline_ms=250,
        n=1,
        user="robot",
        tools=[],
        response_format={"type": "text"},
    )
    request = found.request
    assert (request.budget, request.temperature, request.top_p, request.seed) == ("none", 0.5, 0.9, 4)
    assert (request.min_new_tokens, request.max_new_tokens) == (3, 9)
    assert (request.stop, request.deadline_ms) == (("a", "b"), 250)
    assert (found.stream, found.include_usage, found.logprobs, found.priority) == (True, True, 3, -2)
    assert (found.kept_tokens, found.session) == (True, False)
    assert read(reader, stop="end").request.stop == ("end",)
    assert read(reader, temperature=None, stop=None).request.temperature == 0


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "schema", {"type": "object"}),
        ({"response_format": json_schema({"type": "integer"})}, "schema", {"type": "integer"}),
        # As llama.cpp's clients send it
        ({"response_format": {"type": "json_object", "schema": {"type": "integer"}}}, "schema", {"type": "integer"}),
        ({"response_format": {"type": "json_schema", "schema": {"type": "integer"}}}, "schema", {"type": "integer"}),
        ({"guided_json": {"type": "integer"}}, "schema", {"type": "integer"}),
        ({"guided_json": '{"type": "integer"}'}, "schema", {"type": "integer"}),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"guided_choice": ["yes", "no"]}, "choice", ("yes", "no")),
    ],
)
def test_forms_of_an_answer(changes: dict[str, Any], field: str, value: object, reader: ChatReader) -> None:
    assert getattr(read(reader, **changes).request, field) == value


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_are_options_of_a_request(name: str, reader: ChatReader) -> None:
    neutral = {"repetition_penalty": None}.get(name, 0)
    assert getattr(read(reader, **{name: 1.5}).request, name) == 1.5
    assert getattr(read(reader, **{name: None}).request, name) == neutral
    scored = read(reader, **{name: 1.5}, guided_choice=["yes", "no"])
    assert getattr(scored.request, name) == neutral
    assert scored.notes == (f"{name} changed nothing: the texts of a closed list are scored whole.",)


@pytest.mark.parametrize(
    ("head", "encode"),
    [
        ("image/png;base64", lambda data: b64encode(data).decode()),
        ("image/png;base64", lambda data: encodebytes(data).decode().replace("\n", "\r\n")),
        ("image/png;base64", lambda data: f" {encodebytes(data).decode()}\n\n".replace("\n", " \t")),
        ("image/png;base64", lambda data: urlsafe_b64encode(data).decode().rstrip("=") + "\n"),
        ("image/png;base64", lambda data: quote(encodebytes(data), safe="")),
        ("image/png; charset=utf-8 ; BASE64 ", lambda data: b64encode(data).decode()),
        (";base64", lambda data: b64encode(data).decode()),
        ("image/png", quote),
    ],
)
def test_data_uris_as_clients_write_them(head: str, encode: Callable[[bytes], str]) -> None:
    data = bytes(range(256))
    for length in (254, 255, 256):
        assert data_uri_bytes(f"data:{head},{encode(data[::-1][:length])}") == data[::-1][:length]


def test_turns_with_pictures_in_their_places(reader: ChatReader) -> None:
    asked = messages(
        ("system", [{"type": "text", "text": "Be"}, {"text": " brief."}]),
        ("user", [{"type": "text", "text": "First:"}, PICTURE, TEXT]),
        ("assistant", "A cup."),
        ("user", [TEXT, PICTURE]),
    )
    request = read(reader, messages=asked).request
    assert request.system == ("Be", " brief.")
    assert [(turn.role, turn.texts) for turn in request.history] == [
        ("user", (("First:",), ("What is this?",))),
        ("assistant", ("A cup.",)),
    ]
    assert (request.texts, len(request.pictures)) == ((("What is this?",), ()), 2)


_USER: dict[str, Any] = {"role": "user", "content": [TEXT]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "other"}, 'model is "other". The server has: m, m:none, m:retain-64. Name'),
        ({"model": None}, "model is missing"),
        ({"model": "m:none", "budget": "retain-64"}, "model names the budget none"),
        ({"budget": "retain-63"}, "this bundle holds no budget 'retain-63'"),
        ({"method": "nothing"}, "this bundle holds no"),
        ({"tool_choice": "required"}, "tool_choice needs a call, and there are no tools"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema is 3, expected"),
        ({"response_format": json_schema(3)}, "response_format.json_schema.schema is 3, expected"),
        ({"guided_choice": ["yes"]}, "guided_choice has 1 different text of 1"),
        ({"guided_regex": "("}, "guided_regex cannot be used: unclosed group"),
        ({"guided_json": "x"}, 'guided_json is "x", expected a JSON schema'),
        ({"guided_json": "3"}, "guided_json is 3, expected a JSON schema"),
        ({"temperature": [True, None]}, "temperature is [true, null], expected"),
        ({"max_tokens": 8, "min_tokens": 9}, "min_tokens is 9, and max_tokens is 8"),
        ({"min_tokens": 2, "min_new_tokens": 3}, "min_tokens is 2, and min_new_tokens is 3"),
        ({"max_completion_tokens": 6, "max_tokens": 4}, "max_completion_tokens is 6, and max_tokens is 4"),
        ({"max_tokens": 4, "max_new_tokens": 5}, "max_tokens is 4, and max_new_tokens is 5"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"stream_options": {"x": 1}}, "stream_options has"),
        ({"n": 2}, "n is 2, supported is 1"),
        ({"unheard": 1}, 'the field "unheard" is not supported. Leave it out.'),
        ({"deadline": 1}, "the field \"deadline\" is not supported; did you mean 'deadline_ms'? Leave"),
        ({"fit": 1}, "fit is an option of sinkprune-serve, not of a request. Start the server with --fit."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_the_field_of_the_body(changes: dict[str, Any], said: str, reader: ChatReader) -> None:
    """Two fields that contradict each other: the last. `test_malformed_bodies.py` has more wrong values."""
    with pytest.raises(ApiError) as refused:
        read(reader, **changes)
    assert refused.value.param == [*changes][-1] and str(refused.value).startswith(said)
    assert refused.value.status == (404 if changes.get("model") == "other" else 400)
    assert "\n" not in str(refused.value)


_A, _B = messages(("user", [PICTURE, TEXT]), ("assistant", "No."))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([_A] * 257, "messages is [{"),
        (["hello"], 'messages[0] is "hello", expected an object'),
        (messages(("user", [TEXT, {"a": None}])), 'messages[0].content[1] is {"a": null}, expected a text'),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id is missing"),
        ([_A, _B], "the last message is not the user's"),
        ([{**_B, "content": [PICTURE]}, _A], "messages[0].content[0] is"),
        ([_A, *messages(("system", "x"))], "messages has a system message after others. Give one, as the first"),
        ([*messages(("system", [PICTURE])), _A], "messages[0].content[0] is"),
        (messages(("user", [{"type": "video_url", "video_url": "data:,x"}])), "messages[0].content[0]: "),
        (messages(("user", [PICTURE])), "the prompt is empty"),
        (messages(("user", [PICTURE, {**PICTURE, "image_url": "data:,"}, TEXT])), "messages[0].content[1]: "),
        ([{**_A, "refusal": False}], "messages[0].refusal is not supported. Leave it out."),
        ([{**_USER, "a b": 1}], 'the key "a b" of messages[0] is not supported. Leave it out.'),
        ([{**_USER, "tool_calls": [1]}], "messages[0].tool_calls is not supported. Leave it out."),
        ([{**_USER, "image_url": "file:///a.jpg"}], "messages[0].image_url is not supported. Leave it out."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_with_messages_is_one_sentence(given: Any, said: str, reader: ChatReader) -> None:
    with pytest.raises(ApiError) as refused:
        read(reader, messages=given)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
    assert (refused.value.status, refused.value.param) == (400, "messages")


FORMS = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["yes", "no"],
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "look"}}],
    "stop": "x",
}


@pytest.mark.parametrize(("first", "second"), [*combinations(FORMS, 2)])
def test_two_forms_of_an_answer_are_named_as_in_the_body(first: str, second: str, reader: ChatReader) -> None:
    with pytest.raises(ApiError) as refused:
        # In either order.
        read(reader, **{second: FORMS[second], first: FORMS[first]})
    assert str(refused.value).startswith(f"{first} and {second} were given")


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (("max_tokens", "max_completion_tokens"), "max_new_tokens"),
        (("min_tokens", "min_new_tokens"), "min_new_tokens"),
    ],
)
def test_two_names_of_one_option(names: tuple[str, str], option: str, reader: ChatReader) -> None:
    for one, other in (names, names[::-1]):
        assert getattr(read(reader, **{one: 4, other: 4}).request, option) == 4
        # true is no other spelling of 1.
        with pytest.raises(ApiError, match="is true"):
            read(reader, **{one: 1, other: True})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"model": NaN}', SURROGATE, DEEP]
)
def test_a_body_that_is_no_object(body: bytes, reader: ChatReader) -> None:
    with pytest.raises(ApiError) as refused:
        reader.read(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1/a.png", "no data URI"),
        ("https://example.com/a.png", "--allow-remote-images"),
        ("/etc/passwd", 'image_url.url is "/etc/passwd", no data URI'),
        (None, "image_url.url is null"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,%%%", "no valid base64"),
        ("data:image/png;base64,AAAA", "no known format"),
        ("data:image/png;base64,", "0 characters of base64, which no file has"),
        ("data:image/png;base64,AA==AA==", 'character 3 is "="'),
        ("data:image/png,iVBORw0KGgo=", "has no ;base64"),
        (f"data:image/png;base64,{URI}", 'character 5 is ":"'),
        ("data:text/plain,hello", 'has no ;base64 before its comma: "text/plain"'),
    ],
)
def test_a_picture_that_cannot_be_read(url: Any, said: str, reader: ChatReader) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(ApiError, match=said):
        read(reader, messages=messages(("user", [part, TEXT])))


def test_an_image_url_may_be_a_string_and_percent_encoded(reader: ChatReader) -> None:
    for url in (URI, URI.replace("+", "%2B").replace("=", "%3D"), URI.replace("data:", "DATA:")):
        part = {"type": "image_url", "image_url": url}
        assert len(read(reader, messages=messages(("user", [part, TEXT]))).request.pictures) == 1


def test_messages_as_clients_send_them_back(reader: ChatReader) -> None:
    # The fields of the openai package's ChatCompletionMessage, and the names that LangChain gives.
    answer = {"role": "assistant", "content": "A cup.", "refusal": None, "annotations": [], "audio": None}
    answer |= {"function_call": None, "tool_calls": None, "name": "robot", "reasoning": None}
    found = read(reader, messages=[_USER, answer, {**_USER, "name": "ann"}])
    assert [turn.role for turn in found.request.history] == ["user", "assistant"]


def test_the_field_of_an_error_while_a_request_runs() -> None:
    assert field_of(NewTokensError(""), {"max_completion_tokens", "messages"}) == "max_completion_tokens"
    assert field_of(ToolsError(""), {"tools"}) == "tools" and field_of(ToolsError(""), set()) == "messages"
    assert field_of(PromptError(""), {"tools"}) == "messages" and field_of(DeadlineError(""), set()) == "deadline_ms"
