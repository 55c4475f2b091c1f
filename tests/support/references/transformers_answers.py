"""What transformers answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
