"""Bodies of `/v1/chat/completions`: what they ask for, and one sentence for what is wrong."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from itertools import combinations
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Pipeline
from sinkprune.runtime.steps.context_length import check_picture_count
from sinkprune.serving.body_fields import ApiError
from sinkprune.serving.chat_request import ChatReader, ChatRequest, model_names
from sinkprune.serving.picture_urls import PictureReader, data_uri_bytes

# Less deep than Python's own limit, which later code would reach.
DEEP = (
    b'{"model": "m", "temperature": ' + b"[" * 950 + b"]" * 950 + b', "messages": [{"role": "user", "content": "x"}]}'
)
TEXT = {"type": "text", "text": "What is this?"}


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def as_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def data_uri(image: Image.Image) -> str:
    return as_uri(png(image))


URI = data_uri(Image.new("RGB", (8, 6), "red"))
PICTURE = {"type": "image_url", "image_url": {"url": URI}}
DAMAGED = {"type": "image_url", "image_url": {"url": as_uri(png(Image.new("RGB", (800, 600), "red"))[:-40])}}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": [PICTURE, TEXT]}]}


@pytest.fixture(scope="module")
def reader(pipeline: Callable[..., Pipeline]) -> ChatReader:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",), max_images=3)
    return ChatReader(
        "m",
        model_names("m", pipe.bundle.manifest, "sinkpruner"),
        "retain-64",
        "sinkpruner",
        pipe,
        pipe.bundle.manifest.plan,
        lambda pictures: check_picture_count(pipe.bundle.manifest, pipe.limits, pictures),
        PictureReader(pipe.family, None),
    )


def read(reader: ChatReader, **changes: Any) -> ChatRequest:
    return reader.read(json.dumps({**BODY, **changes}).encode())


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def messages(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_the_defaults(reader: ChatReader) -> None:
    found = read(reader)
    assert (found.model, found.stream, found.include_usage, found.logprobs, found.priority) == (
        "m",
        False,
        False,
        None,
        0,
    )
    request = found.request
    assert (request.texts, request.budget, request.method) == (((), ("What is this?",)), "retain-64", "sinkpruner")
    assert (request.temperature, request.top_p, request.seed, request.stop) == (0, 1, None, ())
    assert request.pictures[0].decoded().getpixel((0, 0)) == (255, 0, 0)  # type: ignore[union-attr]


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
    assert (found.kept_tokens, found.session) == (False, True)
    own = read(reader, kept_tokens=True, session=False)
    assert (own.kept_tokens, own.session) == (True, False)
    assert read(reader, stop="end", max_tokens=7).request.stop == ("end",)
    assert read(reader, max_tokens=7).request.max_new_tokens == 7
    assert read(reader, temperature=None, stop=None).request.temperature == 0


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "schema", {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}},
            "schema",
            {"type": "integer"},
        ),
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


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key"])
def test_names_of_users_change_nothing(name: str, reader: ChatReader) -> None:
    assert read(reader, **{name: "robot-7"}).request.texts == read(reader).request.texts


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_are_options_of_a_request(name: str, reader: ChatReader) -> None:
    neutral = {"repetition_penalty": None}.get(name, 0)
    assert getattr(read(reader, **{name: 1.5}).request, name) == 1.5
    assert getattr(read(reader, **{name: None}).request, name) == neutral
    scored = read(reader, **{name: 1.5}, guided_choice=["yes", "no"])
    assert getattr(scored.request, name) == neutral
    assert scored.notes == (f"{name} changed nothing: the texts of a closed list are scored whole.",)


def in_lines(data: bytes) -> str:
    return base64.encodebytes(data).decode()


def plain(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("head", "encode"),
    [
        ("image/png;base64", plain),
        ("image/png;base64", in_lines),
        ("image/png;base64", lambda data: in_lines(data).replace("\n", "\r\n")),
        ("image/png;base64", lambda data: f" {in_lines(data)}\n\n".replace("\n", " \t")),
        ("image/png;base64", lambda data: plain(data).rstrip("=")),
        ("image/png;base64", lambda data: base64.urlsafe_b64encode(data).decode()),
        ("image/png;base64", lambda data: base64.urlsafe_b64encode(data).decode().rstrip("=") + "\n"),
        ("image/png;base64", lambda data: quote(plain(data), safe="")),
        ("image/png;base64", lambda data: quote(in_lines(data), safe="")),
        ("image/png; base64", plain),
        ("image/png; charset=utf-8 ; BASE64 ", plain),
        ("image/png;name=a.png;base64", in_lines),
        (";base64", plain),
        ("image/png", quote),
    ],
)
def test_data_uris_as_clients_write_them(head: str, encode: Callable[[bytes], str]) -> None:
    data = bytes(range(256))
    for length in (254, 255, 256):
        assert data_uri_bytes(f"data:{head},{encode(data[::-1][:length])}") == data[::-1][:length]


def test_white_space_around_an_address_is_left_out(reader: ChatReader) -> None:
    part = {"type": "image_url", "image_url": {"url": f"\n {URI}\r\n"}}
    assert len(read(reader, messages=messages(("user", [part, TEXT]))).request.pictures) == 1


def test_turns_with_pictures_in_their_places(reader: ChatReader) -> None:
    asked = messages(
        ("system", [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]),
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


def test_a_request_without_pictures_has_nothing_to_prune(reader: ChatReader) -> None:
    assert read(reader, messages=messages(("user", "Hello?"))).request.budget == "none"


_A, _B = messages(("user", [PICTURE, TEXT]), ("assistant", "No."))


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"model": "other"}, 404, "the server has m, m:none, m:retain-64"),
        ({"model": "m:retain-63"}, 404, "the server has"),
        ({"model": ["m"]}, 404, "model is"),
        ({"model": "m:none", "budget": "retain-64"}, 400, "model names the budget none"),
        ({"budget": "retain-63"}, 400, "retain-63"),
        ({"budget": 3}, 400, "budget is 3"),
        ({"method": "nothing"}, 400, "nothing"),
        ({"n": 2}, 400, "n is 2, supported is 1"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty is 2.5"),
        ({"tools": [{"type": "function"}]}, 400, r"tools\[0\] is"),
        ({"tool_choice": "required"}, 400, "there are no tools"),
        ({"parallel_tool_calls": 1}, 400, "parallel_tool_calls is 1"),
        ({"response_format": {"type": "xml"}}, 400, "response_format is"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format is"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, 400, "json_schema.schema is 3"),
        ({"response_format": {"type": "json_object", "schema": 3}}, 400, "response_format.schema is 3"),
        (
            {"guided_choice": ["yes", "no"], "guided_regex": "yes|no"},
            400,
            "guided_regex and guided_choice",
        ),
        ({"guided_choice": ["yes", "no"], "stop": "x"}, 400, "guided_choice and stop were given"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, 400, "guided_json and response_format"),
        ({"temperature": "hot"}, 400, 'temperature is "hot"'),
        ({"temperature": True}, 400, "temperature is true"),
        ({"top_p": 0}, 400, "top_p is 0"),
        ({"seed": -1}, 400, "seed is -1"),
        ({"stop": [""]}, 400, "stop is"),
        ({"stop": 3}, 400, "stop is 3"),
        ({"deadline_ms": 0}, 400, "deadline_ms is 0"),
        ({"priority": 1000}, 400, "priority is 1000"),
        ({"logprobs": 1}, 400, "logprobs is 1"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs is 21"),
        ({"stream": "yes"}, 400, 'stream is "yes"'),
        ({"stream_options": []}, 400, "stream_options is"),
        ({"stream_options": {"continuous_usage_stats": True}}, 400, 'stream_options has "continuous_usage_stats"'),
        ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens is 9, and max_tokens is 8"),
        ({"min_tokens": -1}, 400, "min_tokens is -1"),
        ({"messages": None}, 400, "messages is missing"),
        ({"messages": []}, 400, r"messages is \[\]"),
        ({"messages": [_A] * 257}, 400, "1 to 256 messages"),
        ({"messages": ["hello"]}, 400, r"messages\[0\] is a string, expected an object"),
        ({"messages": [{"content": None}]}, 400, r"messages\[0\].role is missing"),
        ({"messages": messages(("user", None))}, 400, r"messages\[0\].content is null"),
        ({"messages": messages(("user", [TEXT, {"a": None}]))}, 400, r'content\[1\] is {"a": null}, expected a text'),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, r"messages\[0\].tool_call_id is missing"),
        ({"messages": [_A, _B]}, 400, "the last message is not the user's"),
        ({"messages": [{**_B, "content": [PICTURE]}, _A]}, 400, "Pictures are the user's"),
        ({"messages": [_A, *messages(("system", "x"))]}, 400, "Give one, as the first message"),
        (
            {"messages": [*messages(("system", [PICTURE])), _A]},
            400,
            r"messages\[0\].content\[0\] is .*, expected a text",
        ),
        ({"messages": messages(("user", 5))}, 400, r"messages\[0\].content is 5"),
        (
            {"messages": messages(("user", [{"type": "input_audio"}]))},
            400,
            "expected a text, an image_url",
        ),
        (
            {"messages": messages(("user", [{"type": "text", "text": 3}]))},
            400,
            "expected a text, an image_url",
        ),
        ({"messages": messages(("user", [{"type": "video_url", "video_url": "data:,x"}]))}, 400, "takes no video"),
        ({"messages": messages(("user", [PICTURE]))}, 400, "the prompt is empty"),
        ({"messages": messages(("user", "\ud800"))}, 400, "the body holds half of a surrogate pair"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, (dict, str)) else None,
)
def test_what_is_wrong_is_one_sentence(changes: dict[str, Any], status: int, said: str, reader: ChatReader) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        read(reader, **changes)
    assert refused.value.status == status
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", 0, "max_tokens is 0, expected"),
        ("max_tokens", 1.5, "max_tokens is 1.5, expected"),
        ("max_completion_tokens", -1, "max_completion_tokens is -1, expected"),
        ("guided_choice", ["yes"], "guided_choice has 1 different text of 1"),
        ("guided_choice", [], "guided_choice is [], expected"),
        ("guided_choice", "yes", 'guided_choice is "yes", expected'),
        ("guided_regex", "(", "guided_regex cannot be used: unclosed group"),
        ("guided_regex", 3, "guided_regex is 3, expected"),
        ("guided_json", {"type": "nothing"}, "guided_json is not supported"),
        ("guided_json", "x", 'guided_json is "x", expected a JSON schema'),
        ("guided_json", r'"\ud800"', "guided_json is"),
        ("guided_json", "3", "guided_json is 3, expected a JSON schema"),
        ("response_format", json_schema(3), "response_format.json_schema.schema is 3, expected"),
        ("response_format", json_schema({"type": "x"}), "response_format.json_schema.schema is not supported"),
        ("temperature", -1, "temperature is -1, expected"),
        ("temperature", [True, None], "temperature is [true, null], expected"),
        ("top_p", 2, "top_p is 2, expected"),
        ("seed", -1, "seed is -1, expected"),
        ("stop", "", 'stop is "", expected'),
        ("stop", ["a", ""], 'stop is ["a", ""], expected'),
        ("budget", 3, "budget is 3, expected"),
        ("budget", "retain-63", "this bundle holds no budget 'retain-63'"),
        ("method", "nothing", "this bundle holds no"),
        ("min_new_tokens", -1, "min_new_tokens is -1, expected"),
        ("deadline_ms", 0, "deadline_ms is 0, expected"),
        ("priority", 101, "priority is 101, expected"),
        ("stream_options", {"x": 1}, "stream_options has"),
        ("tools", [{"type": "function"}], "tools[0] is"),
        ("n", True, "n is true, supported is 1"),
        ("store", 0, "store is 0, supported is false"),
        ("logit_bias", [], "logit_bias is [], supported is {}"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage is 1, expected"),
        ("response_format", {}, "response_format is {}, expected type text"),
        ("priority", False, "priority is false, expected"),
        ("messages", [{**_A, "refusal": False}], "messages[0].refusal is not supported"),
        ("messages", [{**_B, "tool_calls": 0}, _A], "messages[0].tool_calls is 0, expected a list"),
        ("repetition_penalty", 0, "repetition_penalty is 0, expected"),
        ("presence_penalty", -2.5, "presence_penalty is -2.5, expected"),
        ("frequency_penalty", True, "frequency_penalty is true, expected"),
        ("model", None, "model is missing"),
        ("messages", messages(("user", [PICTURE])), "the prompt is empty"),
        (
            "messages",
            messages(("user", [PICTURE, {**PICTURE, "image_url": "data:,"}, TEXT])),
            "messages[0].content[1]",
        ),
        ("top_logprobs", 2, "top_logprobs needs logprobs"),
        ("n", 2, "n is 2, supported is 1"),
    ],
)
def test_errors_name_the_field_of_the_body(field: str, value: Any, said: str, reader: ChatReader) -> None:
    with pytest.raises(ApiError) as refused:
        read(reader, **{field: value})
    assert refused.value.param == field and str(refused.value).startswith(said)


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


@pytest.mark.parametrize("names", [("max_tokens", "max_completion_tokens"), ("min_tokens", "min_new_tokens")])
def test_true_is_no_other_spelling_of_1(names: tuple[str, str], reader: ChatReader) -> None:
    for one, other in (names, names[::-1]):
        with pytest.raises(ApiError, match="is true"):
            read(reader, **{one: 1, other: True})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"model": NaN}', DEEP])
def test_a_body_that_is_no_object(body: bytes, reader: ChatReader) -> None:
    with pytest.raises(ApiError) as refused:
        reader.read(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1/a.png", "no data URI"),
        ("https://example.com/a.png", "--allow-remote-images"),
        ("file:///etc/passwd", "no data URI"),
        ("/etc/passwd", 'image_url.url is "/etc/passwd", no data URI'),
        ("", "no data URI"),
        (None, "image_url.url is null"),
        (5, "image_url.url is 5"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,%%%", "no valid base64"),
        ("data:image/png;base64,AAAA", "no known format"),
        ("data:image/png;base64,", "0 characters of base64, which no file has"),
        ("data:image/png;base64,AAAAA", "5 characters of base64"),
        ("data:image/png;base64,AA==AA==", 'character 3 is "="'),
        ("data:image/png;base64,b'AAAA'", 'character 2 is "\'"'),
        ("data:image/png;base64,AAAA…", 'character 5 is "…"'),
        ("data:image/png,iVBORw0KGgo=", "has no ;base64"),
        ("data:base64,iVBORw0KGgo=", "has no ;base64"),
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


_LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([URI, "user"])
_JSON: st.SearchStrategy[Any] = st.deferred(
    lambda: _LEAF | st.lists(_JSON, max_size=3) | st.dictionaries(st.text(max_size=8), _JSON, max_size=3)
)
_FIELDS = (
    *("model", "messages", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "logprobs", "n"),
    *("top_logprobs", "max_tokens", "priority", "deadline_ms", "budget", "method", "tools", "response_format", "x"),
    *("guided_json", "guided_regex", "guided_choice", "tool_choice", "parallel_tool_calls"),
)
_PARTS = st.fixed_dictionaries({}, optional={"type": _JSON, "text": _JSON, "image_url": _JSON}) | _JSON
_MESSAGE = {"role": _JSON, "content": st.lists(_PARTS) | _JSON, "tool_calls": _JSON, "tool_call_id": _JSON}
_MESSAGES = st.lists(st.fixed_dictionaries({}, optional=_MESSAGE) | _JSON)


@settings(max_examples=500, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3), turns=st.none() | _MESSAGES)
def test_any_body_is_read_or_refused_with_a_4xx(changes: dict[str, Any], turns: Any, reader: ChatReader) -> None:
    try:
        read(reader, **{**changes, **({} if turns is None else {"messages": turns})})
    except ApiError as error:
        assert 400 <= error.status < 500
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1000
