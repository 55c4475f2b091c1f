"""Keys within messages, two names of one option, and the field that an error names while a request runs."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from tests.serving.test_chat_request import TEXT, read, reader
from tests.serving.test_server import pipe, post, served

from sinkprune import Pipeline, PromptError
from sinkprune.contract.errors import DeadlineError, NewTokensError, ToolsError
from sinkprune.serving.body_fields import ApiError, field_of
from sinkprune.serving.chat_request import ChatReader

__all__ = ["pipe", "reader"]
USER: dict[str, Any] = {"role": "user", "content": [TEXT]}


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({**USER, "foo": 1}, "messages[0].foo"),
        ({**USER, "contents": "x"}, "messages[0].contents"),
        ({**USER, "a b": 1}, 'the key "a b" of messages[0]'),
        ({**USER, "tool_calls": [1]}, "messages[0].tool_calls"),
        ({**USER, "image_url": "file:///a.jpg"}, "messages[0].image_url"),
        ({**USER, "refusal": "I cannot."}, "messages[0].refusal"),
    ],
)
def test_unknown_keys_of_messages_are_refused(message: dict[str, Any], place: str, reader: ChatReader) -> None:
    with pytest.raises(ApiError) as refused:
        read(reader, messages=[message])
    assert str(refused.value) == f"{place} is not supported. Leave it out."
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unheard", 'the field "unheard" is not supported. Leave it out.'),
        ("deadline", """the field "deadline" is not supported; did you mean 'deadline_ms'? Leave it out."""),
        ("choice", """the field "choice" is not supported; did you mean 'guided_choice'? Leave it out."""),
        ("schema", """the field "schema" is not supported; did you mean 'guided_json'? Leave it out."""),
        ("fit", "fit is an option of sinkprune-serve, not of a request. Start the server with --fit."),
    ],
)
def test_unknown_fields_of_bodies_are_refused(name: str, said: str, reader: ChatReader) -> None:
    with pytest.raises(ApiError) as refused:
        read(reader, **{name: 1})
    assert (str(refused.value), refused.value.status, refused.value.param) == (said, 400, name)


def test_messages_as_clients_send_them_back(reader: ChatReader) -> None:
    # The fields of the openai package's ChatCompletionMessage, and the names that LangChain gives.
    answer = {"role": "assistant", "content": "A cup.", "refusal": None, "annotations": [], "audio": None}
    answer |= {"function_call": None, "tool_calls": None, "name": "robot", "reasoning": None}
    found = read(reader, messages=[USER, answer, {**USER, "name": "ann"}])
    assert [turn.role for turn in found.request.history] == ["user", "assistant"]


def test_two_names_of_one_option(reader: ChatReader) -> None:
    with pytest.raises(ApiError, match="min_tokens is 2, and min_new_tokens is 3") as refused:
        read(reader, min_tokens=2, min_new_tokens=3)
    assert refused.value.param == "min_new_tokens"
    assert read(reader, min_tokens=3, min_new_tokens=3).request.min_new_tokens == 3
    with pytest.raises(ApiError, match="max_completion_tokens is 6, and max_tokens is 4") as refused:
        read(reader, max_tokens=4, max_completion_tokens=6)
    assert refused.value.param == "max_tokens"
    assert read(reader, max_tokens=4, max_completion_tokens=4).request.max_new_tokens == 4
    assert read(reader, max_new_tokens=5).request.max_new_tokens == 5
    with pytest.raises(ApiError, match="max_tokens is 4, and max_new_tokens is 5") as refused:
        read(reader, max_tokens=4, max_new_tokens=5)


def test_the_field_of_an_error_while_a_request_runs() -> None:
    assert field_of(NewTokensError(""), {"max_completion_tokens", "messages"}) == "max_completion_tokens"
    assert field_of(ToolsError(""), {"tools"}) == "tools" and field_of(ToolsError(""), set()) == "messages"
    assert field_of(PromptError(""), {"tools"}) == "messages" and field_of(DeadlineError(""), set()) == "deadline_ms"


def test_tools_without_a_template_name_their_field(pipe: Pipeline, photo: Image.Image) -> None:
    tools = [{"type": "function", "function": {"name": "stop", "description": "Stop the robot."}}]
    with served(pipe) as address:
        error = post(address, tools=tools).json()["error"]
    assert error["param"] == "tools" and "chat template has no tools" in error["message"]
