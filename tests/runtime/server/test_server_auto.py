"""Budget `auto` over HTTP."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.runtime.server.test_server import served

from sinkprune import Pipeline, Thresholds, write_thresholds
from support.programs.commands import assert_refused, run

QUESTION, LIST = "What is on the table?", ["a", "b"]


@pytest.fixture
def pipe(bundle: Callable[..., Path]) -> Pipeline:
    pipe = Pipeline.load(bundle("gqa-112", "fp32", ("retain-64", "retain-192")), threads=1)
    least = {"retain-64": 1.0, "none": 0.0}
    pipe.thresholds = Thresholds(1, pipe.bundle.sha256, pipe.backend.compute, "sinkpruner", least)
    return pipe


def body(photo: Image.Image, **fields: Any) -> dict[str, Any]:
    file = io.BytesIO()
    photo.save(file, "PNG")
    url = {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
    return {"model": "m:auto", "messages": [{"role": "user", "content": parts}], **fields}


def test_the_model_auto_answers_closed_lists(pipe: Pipeline, photo: Image.Image) -> None:
    expected = pipe.generate(photo, QUESTION, budget="none", choice=LIST)
    with served(pipe) as address, httpx.Client(base_url=f"{address}/v1", timeout=60) as client:
        assert [one["id"] for one in client.get("/models").json()["data"]][-1] == "m:auto"
        for fields in ({}, {"model": "m", "budget": "auto"}):
            answer = client.post("/chat/completions", json=body(photo, guided_choice=LIST, **fields)).json()
            assert answer["choices"][0]["message"]["content"] == expected.text
            found = answer["sinkprune"]
            assert found["budget"] == "none" and [one["budget"] for one in found["tried"]] == ["retain-64", "none"]
            assert found["tried"][-1]["confidence"] == found["confidence"]
        refused = client.post("/chat/completions", json=body(photo))
        assert refused.status_code == 400 and "closed list" in refused.json()["error"]["message"]
        plain = client.post("/chat/completions", json=body(photo, model="m", guided_choice=LIST)).json()
        assert plain["sinkprune"]["tried"] == []


def test_without_thresholds_there_is_no_auto(pipe: Pipeline, photo: Image.Image, tmp_path: Path) -> None:
    thresholds, pipe.thresholds = pipe.thresholds, None
    with served(pipe) as address, httpx.Client(base_url=f"{address}/v1", timeout=60) as client:
        assert client.post("/chat/completions", json=body(photo, guided_choice=LIST)).status_code == 404
        asked = body(photo, model="m", budget="auto", guided_choice=LIST)
        refused = client.post("/chat/completions", json=asked)
        assert refused.status_code == 400 and "sinkprune-calibrate confidence" in refused.json()["error"]["message"]
    assert thresholds is not None
    write_thresholds(tmp_path / "other.json", replace(thresholds, bundle_sha256="0" * 64))
    path = pipe.bundle.path
    assert_refused(run("sinkprune-serve", path, "--budget", "auto"), "sinkprune-calibrate confidence")
    assert_refused(run("sinkprune-serve", path, "--thresholds", tmp_path / "other.json"), "this bundle's is")
    write_thresholds(tmp_path / "other.json", replace(thresholds, compute="bf16"))
    assert_refused(
        run("sinkprune-serve", path, "--thresholds", tmp_path / "other.json"), "engines that compute in 'bf16'"
    )
