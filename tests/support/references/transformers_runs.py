"""What transformers answers, and the attention of its decoder layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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
