"""A question to a pipeline, and the logits behind its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.runtime.answer import Answer

Array = np.ndarray[Any, Any]
QUESTION = "What is in the picture?"


def ask(
    pipeline: Pipeline,
    photo: Image.Image | Sequence[Image.Image],
    budget: str,
    new_tokens: int,
    question: str | Sequence[str] = QUESTION,
) -> tuple[Answer, Array]:
    """The answer, exactly `new_tokens` long, and the logits [new_tokens,vocab] of all its tokens."""
    logits: list[Array] = []
    vocabulary = (1, pipeline.bundle.manifest.language_model.vocab_size)
    numpy = pipeline.backend.numpy

    def recorded(tensor: Any) -> Array:
        array = numpy(tensor)
        if array.shape == vocabulary:
            logits.append(array)
        return array

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.backend, "numpy", recorded)
        answer = pipeline.generate(
            photo, question, budget=budget, max_new_tokens=new_tokens, min_new_tokens=new_tokens
        )
    return answer, np.concatenate(logits)
