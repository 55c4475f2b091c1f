"""The requests of clients on robots: bob_llm, RAI, llama_ros with LangChain, and live-vlm-webui (docs/ros2.md).

`robot_clients.jsonl` has the JSON bodies that these clients send, with questions of our own, and `JPEG` and `PNG` in
place of a picture in base64. Those of RAI and llama_ros were recorded from langchain-openai 1.7.4, which they call.
Those of bob_llm (1.0.3) and live-vlm-webui follow their code. Requests with status 400 are not supported, those with
tools because Qwen2.5-VL's template has none.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.serving.test_server import served

from sinkprune import Pipeline

CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("robot_clients.jsonl").read_text(encoding="utf-8").splitlines()
]
BUDGET = "prune-66.7"
REASONS = (
    "the model's chat template has no tools",
    "--allow-remote-images",
    "response_format and stop were given",
    "tools and stop were given",
)
"""What responses with status 400 say."""


@pytest.fixture(scope="module")
def pipe(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("qwen-tied", "fp32", (BUDGET,))


@pytest.fixture(scope="module")
def address(pipe: Pipeline) -> Iterator[str]:
    with served(pipe, budget="none") as address:
        yield address


def in_base64(picture: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    picture.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("case", CASES, ids=[f"{case['client']}: {case['what']}" for case in CASES])
def test_a_client_s_request_is_answered(
    case: dict[str, Any], address: str, pipe: Pipeline, photo: Image.Image
) -> None:
    text = json.dumps(case["body"])
    pictures = {kind: in_base64(photo.resize((150, 100)), kind) for kind in ("JPEG", "PNG")}
    kind = next((kind for kind in pictures if f"base64,{kind}" in text), None)
    for name, picture in pictures.items():
        text = text.replace(f"base64,{name}", f"base64,{picture}")
    body = json.loads(text)
    # bob_llm sends this header if it has no key, and OpenAI's client the word that it was given.
    headers = {"Authorization": "Bearer no_key", "Content-Type": "application/json"}
    response = httpx.post(f"{address}/v1/chat/completions", content=text, headers=headers, timeout=60)
    assert response.status_code == case["status"], response.text
    if case["status"] == 400:
        assert any(reason in response.json()["error"]["message"] for reason in REASONS)
        return
    if body.get("stream"):
        # bob_llm reads a stream line by line.
        *lines, last = [line for line in response.text.split("\n") if line]
        assert last == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        answer = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        done, finish = chunks[-1]["sinkprune"], chunks[-1]["choices"][0]["finish_reason"]
    else:
        [choice], done = response.json()["choices"], response.json()["sinkprune"]
        answer, finish = choice["message"]["content"], choice["finish_reason"]
    assert finish in ("stop", "length")
    assert done["budget"] == (BUDGET if kind else "none")
    form = body.get("response_format", {}).get("type")
    if form == "json_schema":
        assert json.loads(answer).keys() == {"colour", "blocked"}
    elif form == "json_object":
        assert answer.startswith("{")
    elif kind and not (body.get("temperature") or body.get("top_p")):
        picture = Image.open(io.BytesIO(base64.b64decode(pictures[kind])))
        system = next((one["content"] for one in body["messages"] if one["role"] == "system"), None)
        question = body["messages"][-1]["content"][0]["text"]
        # The picture follows the question.
        greedy = pipe.generate(picture, [question, ""], budget=BUDGET, system=system)
        assert answer == greedy.text != ""
        assert done["tokens_per_layer"] == greedy.tokens_per_layer
