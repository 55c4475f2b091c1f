"""The attention of transformers' own decoder layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

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
