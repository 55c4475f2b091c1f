"""pi0-FAST in plain torch and numpy: its tokens, unpruned and with dropped tokens masked, and their actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from sinkprune.contract.budgets import parse_budget
from support.models.pi0_fast_checkpoints import SKIP, cosines
from support.references.masking import Array, Sequence, Towers, embedded, masked_forward, policy_prompt
from support.references.reference import one_stage


def prompt_ids(tokenizer: Any, instruction: str, state: Array) -> list[int]:
    """The ids of LeRobot's prompt, with the second BOS; `state` is normalised."""
    bins = np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1
    ids: list[int] = tokenizer(f"Task: {instruction}, State: {' '.join(map(str, bins))};\n")["input_ids"]
    return [*ids, tokenizer.bos_token_id]


def masked_prompt(model: Any, towers: Towers, ids: list[int], budget: str | None) -> tuple[Sequence, list[list[int]]]:
    """The rows of a prompt with the tokens that the sanitizer keeps, and these tokens of each camera."""
    return policy_prompt(model.model, towers, ids, "pi0-fast", budget)


def tokens_of(model: Any, prompt: Sequence, count: int, most: int, budget: str | None) -> list[int]:
    """The likeliest `most` tokens after a prompt whose cameras have `count` tokens each."""
    stages: dict[int, int | list[int]] = {}
    if budget is not None:
        stages |= one_stage(parse_budget("pi0-fast", budget), count, model.config.text_config.num_hidden_layers)
    found = list[int]()
    while len(found) < most:
        later = embedded(model, found)
        run = masked_forward(model, prompt, budget or "prune-80", stages, later=later)
        found.append(int(run.logits[-1].argmax()))
    return found


def actions_of(
    tokens: list[int], tokenizer: Any, folder: Path, chunk: int, width: int, scale: float, least: int
) -> Array:
    """The actions of tokens of FAST, by the tokenizer in `folder`, as LeRobot's `relaxed_decoding`."""
    fast = AutoTokenizer.from_pretrained(folder)
    text = fast.decode([tokenizer.vocab_size - 1 - SKIP - token for token in tokens])
    given = np.array([*map(ord, text)], float) + least
    given = np.pad(given, (0, max(0, chunk * width - len(given))))[: chunk * width]
    return np.linalg.solve(cosines(chunk), given.reshape(chunk, width) / scale)
