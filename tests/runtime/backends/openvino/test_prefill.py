"""Prompts in OpenVINO, and new tokens in one session of ONNX Runtime for all segments and the head."""

from __future__ import annotations

from collections.abc import Callable
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


def stepped(pipe: Pipeline, cache: KVCache, token: int) -> Any:
    return pipe.backend.numpy(decode_one_token(pipe.chain, cache, pipe.embedding([token])[0]))


@pytest.mark.parametrize("budget", ["retain-64+compact", "none"])
def test_tokens_and_rows_after_them_have_the_logits_of_onnxruntime(
    budget: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    """Where caches of segments grow at different tokens, and positions differ."""
    root, ran = bundle("gqa-112", "fp32", ("retain-64+compact",)), list[str]()

    def wrap(graph: str, engine: Any, backend: Any) -> Any:
        return lambda inputs: (ran.append(graph), engine(inputs))[1]

    names = "ort-cpu+openvino-prefill", "ort-cpu"
    pipes = [Pipeline.load(root, backend=name, compute="fp32", check_sums=False, wrap=wrap) for name in names]
    caches = [watched(pipe, photo, QUESTION, budget=budget, max_new_tokens=1).prefill.cache for pipe in pipes]

    def compare(logits: Callable[[Pipeline, KVCache], Any]) -> None:
        own, expected = map(logits, pipes, caches)
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4)

    ran.clear()
    for number in range(ROOM + 1):
        compare(lambda pipe, cache, token=3 + number % 20: stepped(pipe, cache, token))  # type: ignore[misc]
    assert ran.count("tokens") == ROOM + 1 and ran.count("decoder_0") == ROOM + 1
    compare(lambda pipe, cache: list(logits_of_rows(pipe.chain, cache, pipe.embedding([5, 6, 9]))))
    compare(lambda pipe, cache: stepped(pipe, cache, 7))
    assert caches[0].next_positions == caches[1].next_positions
