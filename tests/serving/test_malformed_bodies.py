"""500 malformed bodies over HTTP, from damaged bytes to wrong fields: each gets a 4xx with one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.serving import test_chat_request as chat_request
from tests.serving.test_chat_request import URI, as_uri, png
from tests.serving.test_server import AS_JSON, served

from sinkprune import Pipeline

PART: tuple[str | int, ...] = ("messages", 0, "content", 0)
BODY = {**chat_request.BODY, "max_tokens": 2}
PICTURE = png(Image.effect_noise((40, 30), 90).convert("RGB"))
_LEAF = st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
JSON: st.SearchStrategy[Any] = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
NO_TEXT = JSON.filter(lambda value: not isinstance(value, str))
NO_OBJECT = JSON.filter(lambda value: not isinstance(value, dict))
NO_LIST = JSON.filter(lambda value: not isinstance(value, list))


def outside(low: float | None, high: float | None) -> st.SearchStrategy[Any]:
    """Numbers outside a range, and values that are no numbers."""
    others = st.booleans() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
    if low is not None:
        others |= st.floats(max_value=low, exclude_max=True, allow_infinity=False)
    if high is not None:
        others |= st.floats(min_value=high, exclude_min=True, allow_infinity=False)
    return others


_PARTS = st.fixed_dictionaries({}, optional={"type": JSON, "text": JSON, "image_url": JSON | st.just(URI)}) | JSON
MESSAGE = {"role": JSON | st.sampled_from(["assistant", "system", "tool"]), "content": st.lists(_PARTS) | JSON}
MESSAGE |= {"tool_calls": JSON, "tool_call_id": JSON}
"""Never a user's, with which messages must end."""
NO_FLAG = JSON.filter(lambda value: not isinstance(value, bool))
NO_FORM = NO_OBJECT | st.fixed_dictionaries({"type": JSON.filter(lambda value: value != "text")})
WRONG: list[tuple[tuple[str | int, ...], st.SearchStrategy[Any]]] = [
    (("model",), JSON | st.sampled_from(["m:", "m:retain", "M"])),
    (("messages",), NO_LIST | st.just([])),
    (("messages", 0), JSON),
    (("messages",), st.lists(st.fixed_dictionaries({}, optional=MESSAGE) | JSON, min_size=1)),
    (("messages", 0, "role"), JSON | st.sampled_from(["assistant", "system", "tool", "function"])),
    (("messages", 0, "content"), NO_TEXT),
    (PART, JSON),
    ((*PART, "type"), JSON | st.sampled_from(["input_audio", "video_url"])),
    ((*PART, "image_url"), NO_TEXT.filter(lambda value: not isinstance(value, dict))),
    ((*PART, "image_url"), JSON),
    ((*PART, "image_url", "url"), JSON),
    ((*PART, "image_url", "url"), st.builds(as_uri, st.binary(max_size=300))),
    ((*PART, "image_url", "url"), st.builds(lambda end: as_uri(PICTURE[:end]), st.integers(0, len(PICTURE) // 2))),
    (("max_tokens",), outside(1, None)),
    (("min_new_tokens",), outside(0, None)),
    (("temperature",), outside(0, None)),
    (("top_p",), outside(0, 1)),
    (("seed",), outside(0, None)),
    (("repetition_penalty",), outside(0, None) | st.just(0)),
    (("priority",), outside(-100, 100)),
    (("deadline_ms",), outside(0, None) | st.just(0)),
    (("stop",), st.integers() | st.lists(st.integers() | st.just(""), min_size=1, max_size=3)),
    *(((name,), NO_FLAG) for name in ("stream", "logprobs", "kept_tokens", "session", "parallel_tool_calls")),
    (("stream_options",), NO_OBJECT),
    (("n",), st.integers(2)),
    (("store",), st.just(0) | st.text()),
    (("logit_bias",), NO_OBJECT),
    (("budget",), JSON | st.just("retain-63")),
    (("method",), JSON),
    (("response_format",), NO_FORM),
    (("guided_json",), NO_OBJECT | st.builds(lambda kind: {"type": kind}, NO_TEXT.filter(lambda kind: kind != []))),
    (("response_format",), st.builds(lambda value: {"type": "json_schema", "json_schema": value}, JSON)),
    (("guided_json",), st.just({"type": "string", "maxLenght": 3})),
    (("guided_json",), st.just({"properties": {"a": {"items": {"contains": {}}}}})),
    (("guided_regex",), NO_TEXT | st.sampled_from(["", "(", "(?=a)", "\ud800"])),
    (("guided_choice",), NO_LIST | st.lists(st.text(max_size=3), max_size=1) | st.just(["a", "a"])),
    (("further",), JSON),
    (("tools",), NO_LIST),
    (("tools",), st.lists(JSON, min_size=1)),
    (("tools",), st.builds(lambda function: [{"type": "function", "function": function}], JSON)),
    (("tool_choice",), JSON | st.just("any")),
    (("messages", 0, "tool_calls"), JSON.filter(lambda value: value not in ("", [], {}))),
]


@pytest.fixture(scope="module")
def client(pipeline: Callable[..., Pipeline]) -> Iterator[httpx.Client]:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",))
    with served(pipe) as address, httpx.Client(base_url=f"{address}/v1", timeout=60) as client:
        yield client


def refused(client: httpx.Client, content: bytes) -> dict[str, Any]:
    """Return the error with which the server rejects a body."""
    found = client.post("/chat/completions", content=content, headers=AS_JSON)
    assert 400 <= found.status_code < 500, (found.status_code, found.text[:300])
    error: dict[str, Any] = found.json()["error"]
    message = error["message"]
    assert message and "\n" not in message and len(message) < 1000
    return error


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_wrong_field_is_a_4xx_with_its_name_and_one_sentence(data: st.DataObject, client: httpx.Client) -> None:
    *path, last = (wrong := data.draw(st.sampled_from(WRONG)))[0]
    body = json.loads(json.dumps(BODY))
    place = body
    for name in path:
        place = place[name]
    value = data.draw(wrong[1].filter(lambda value: value is not None))
    place[last] = value
    field, param = (*path, last)[0], refused(client, json.dumps(body).encode())["param"]
    # A form that is rejected when it is compiled has no field.
    assert param == field or (param is None and field in ("guided_json", "guided_regex", "response_format", "tools"))


@settings(max_examples=100, deadline=None)
@given(end=st.integers(0, len(json.dumps(BODY)) - 1), junk=st.binary(max_size=20), place=st.integers(0, 1000))
def test_damaged_bytes_are_a_4xx_with_one_sentence(end: int, junk: bytes, place: int, client: httpx.Client) -> None:
    content = json.dumps(BODY).encode()
    assert client.post("/chat/completions", content=content, headers=AS_JSON).status_code == 200
    refused(client, content[:end])
    refused(client, content[: place % len(content)] + b"\xff" + junk + content[place % len(content) :])


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [("v1/chat/completions", "secret", 413), ("v1/chat/completions", "", 401), ("none", "", 404)],
)
def test_a_client_that_sends_all_of_a_body_first_reads_the_response(
    path: str, key: str, status: int, pipeline: Callable[..., Pipeline]
) -> None:
    with served(pipeline("gqa-112"), api_key="secret", max_body_bytes=2000) as address:
        request = Request(f"{address}/{path}", b"x" * 20_000_000, {"Authorization": f"Bearer {key}", **AS_JSON})
        with pytest.raises(HTTPError) as refused:
            urlopen(request)
    with refused.value as response:
        assert response.code == status and (status != 413 or b"2000 bytes" in response.read())
