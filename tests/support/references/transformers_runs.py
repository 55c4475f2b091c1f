"""What transformers answers, that an answer equals it, and the attention of its decoder layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sinkprune import Pipeline
from sinkprune.runtime.steps.answer import Answer
from support.references.steps import ask


def greedy_answer(model: Any, inputs: Mapping[str, Any], new_tokens: int) -> Any:
    """What `generate` gives of a greedy answer of exactly `new_tokens` tokens: its sequences and their logits."""
    with torch.no_grad():
        return model.generate(
            **inputs,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )


def assert_equals_transformers(
    model: Any, inputs: Mapping[str, Any], pipe: Pipeline, pictures: Any, question: Any, count: int
) -> Answer:
    """Assert that logits and tokens of an unpruned answer of `count` tokens are those of transformers; return it."""
    expected, length = greedy_answer(model, inputs, count), inputs["input_ids"].shape[1]
    answer, logits = ask(pipe, pictures, "none", count, question)
    assert np.abs(logits - torch.stack(expected.logits)[:, 0].numpy()).max() < 1e-3
    assert answer.token_ids == expected.sequences[0, length:].tolist()
    assert answer.tokens_per_layer[0] + answer.prompt_tokens == length
    return answer


Array = np.ndarray[Any, Any]


@contextmanager
def attentions(model: Any) -> Iterator[list[Array]]:
    """What transformers' own layers attend to while the block runs: [H,S,S] of each decoder layer, in order."""
    seen: list[Array] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, given, gave: seen.append(gave[1][0].numpy()))
        for layer in model.model.language_model.layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
