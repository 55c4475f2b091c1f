"""Chunks of pi0-FAST: tokens to actions by the inverse of FAST (arXiv 2501.09747), as LeRobot computes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from sinkprune.contract.errors import NumericsError
from sinkprune.contract.model_facts import FastTokens, PolicyFacts
from sinkprune.contract.precision import Array

_BEGIN, _END = "Action: ", "|"
_REMEDY = "Give a frame and an instruction like those of its training, or a larger budget."


def actions_of(tokens: Iterable[int], policy: PolicyFacts, tokenizer: Tokenizer) -> tuple[Array, int]:
    """Return a chunk [1,chunk,action_dim] fp32 of the first `tokens`, and how many they are.

    `tokenizer` is that of the decoder. Raises `NumericsError` for tokens that are no actions. LeRobot gives a chunk
    of zeros for some of them, and skips others.
    """
    fast, end, found = policy.fast, tokenizer.token_to_id(_END), list[int]()
    assert fast is not None
    for token in islice(tokens, fast.most):
        found.append(token)
        if token == end:
            break
    begin = tokenizer.encode(_BEGIN, add_special_tokens=False).ids
    if fast.begins and found[:2] != begin[:2]:
        raise NumericsError(f"the policy's answer does not begin with 'Action:', so it is no action. {_REMEDY}")
    first = tokenizer.get_vocab_size(with_added_tokens=False) - 1 - fast.skip
    own = [first - token for token in _without([token for token in found if token != end], begin)]
    coefficients = _coefficients(fast, own, policy.chunk * policy.action_dim)
    return inverse_dct(coefficients.reshape(policy.chunk, policy.action_dim) / fast.scale)[None], len(found)


def inverse_dct(coefficients: Array) -> Array:
    """Return [n,width] fp32: the inverse of an orthogonal DCT of type 2 along the first axis."""
    count = len(coefficients)
    places, frequencies = np.arange(count)[:, None], np.arange(count)
    waves = np.cos(np.pi * (2 * places + 1) * frequencies / (2 * count)) * np.sqrt(2 / count)
    waves[:, 0] = np.sqrt(1 / count)
    actions: Array = (waves @ coefficients).astype(np.float32)
    return actions


def _without(tokens: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return the `tokens` without each `part` of them."""
    left, place = [*tokens], 0
    while part and place <= len(left) - len(part):
        if left[place : place + len(part)] == [*part]:
            del left[place : place + len(part)]
        else:
            place += 1
    return left


def _coefficients(fast: FastTokens, tokens: Sequence[int], wanted: int) -> Array:
    """Return [wanted] fp64: the coefficients of FAST's `tokens`, cut or filled with zeros."""
    if not fast.pieces:
        return np.zeros(wanted)
    for token in tokens:
        if not 0 <= token < len(fast.pieces):
            raise NumericsError(
                f"the policy gave the token {token} as one of FAST, which has {len(fast.pieces)}, so there are no "
                f"actions. {_REMEDY}"
            )
    # Bytes of a character may lie in several tokens.
    text = bytes.fromhex("".join(fast.pieces[token] for token in tokens)).decode("utf-8", "replace")
    given = np.array([*map(ord, text[:wanted])], np.float64) + fast.min_token
    return np.concatenate([given, np.zeros(wanted - len(given))])
