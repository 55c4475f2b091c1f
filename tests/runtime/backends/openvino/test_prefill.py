"""Prompts in OpenVINO, and new tokens in one session of ONNX Runtime for all segments and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.runtime.backends.kv_cache import ROOM
from sinkprune.runtime.steps.decoding import KVCache, decode_one_token
from sinkprune.runtime.steps.scored_rows import logits_of_rows
from support.references.steps import QUESTION, watched

BACKEND = "ort-cpu+openvino-prefill"


@pytest.mark.parametrize("budget", ["retain-64+compact", "none"])
def test_tokens_and_rows_after_them_have_the_logits_of_onnxruntime(
    budget: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    """Where caches of segments grow at different tokens, and positions differ."""
    ran: list[str] = []

    def wrap(graph: str, engine: Any, backend: Any) -> Any:
        def run(inputs: Mapping[str, Any]) -> Any:
            ran.append(graph)
            return engine(inputs)

        return run

    root = bundle("gqa-112", "fp32", ("retain-64+compact",))
    ours = Pipeline.load(root, backend=BACKEND, compute="fp32", check_sums=False, wrap=wrap)
    theirs = Pipeline.load(root, backend="ort-cpu", check_sums=False)
    pipes = ours, theirs
    caches = [watched(pipe, photo, QUESTION, budget=budget, max_new_tokens=1).prefill.cache for pipe in pipes]
    ran.clear()

    def token(number: int) -> None:
        own, expected = (stepped(pipe, cache, number) for pipe, cache in zip(pipes, caches, strict=True))
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4)

    for number in range(ROOM + 1):
        token(3 + number % 20)
    assert ran == ["tokens"] * (ROOM + 1)
    assert caches[0].lengths == caches[1].lengths
    own, expected = (
        list(logits_of_rows(pipe.chain, cache, pipe.embedding([5, 6, 9])))
        for pipe, cache in zip(pipes, caches, strict=True)
    )
    np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4)
    token(7)
    assert caches[0].next_positions == caches[1].next_positions


def stepped(pipe: Pipeline, cache: KVCache, token: int) -> Any:
    return pipe.backend.numpy(decode_one_token(pipe.chain, cache, pipe.embedding([token])[0]))
