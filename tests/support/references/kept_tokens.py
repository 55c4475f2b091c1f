"""The tokens that the sanitizer of any method keeps of a group, by its reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sinkprune.contract.budgets import Counts
from support.references.question_methods import READ_THE_QUESTION, READING_SANITIZERS, text_scores
from support.references.reference import largest, sanitize
from support.references.reference_methods import ON_A_GRID, tops_rows, visionzip, vscan

Array = np.ndarray[Any, Any]


def kept_of(
    method: str,
    counts: Counts,
    features: list[Array],
    question: Array,
    *,
    beside: Array | None = None,
    embeddings: Array | None = None,
) -> tuple[Array, list[int]]:
    """The rows [n0,D'] and the tokens that a method with a sanitizer keeps; `beside` [N,E] goes with the tokens.

    `question` [T,d] are its words as the decoder receives them, and `embeddings` [N,d] the tokens as it does; None
    where the tower projects them.
    """
    tokens, norms, salience = features
    whole = tokens if beside is None else np.concatenate([tokens, beside], axis=-1)
    projected = tokens if embeddings is None else embeddings
    if method in READING_SANITIZERS:
        salience = text_scores(salience, projected, question, largest(norms, counts.outliers))
    if method.startswith("visionzip"):
        options = {"filtered": method != "visionzip", "contextual": counts.diverse, "beside": beside}
        return visionzip(tokens, norms, salience, counts.kept, **options)  # type: ignore[arg-type]
    if method == "vscan":
        # Pictures of one size have a square of tokens.
        side = None if embeddings is None else math.isqrt(len(tokens))
        return vscan(tokens, norms, salience, counts.kept, local=counts.diverse, side=side, beside=beside)
    if method == "tops":
        index = tops_rows(tokens, salience, counts.diverse)
        return whole[index], index
    if method.startswith("sinkpruner"):
        _, index = sanitize(
            tokens,
            norms,
            salience,
            reserve=counts.reserve,
            diverse=counts.diverse,
            remove_outliers=method != "sinkpruner-no-outlier-removal",
            aggregate=method != "sinkpruner-no-aggregation",
            rounds=1 if method == "sinkpruner-paper" else 8,
            centring=method.endswith("+centred"),
        )
        rows = whole[index]
        if counts.sink:
            outliers = np.argsort(-norms, kind="stable")[: counts.outliers]
            rows[0] = whole[outliers].astype(np.float64).mean(axis=0)
        return rows, index
    if method in READ_THE_QUESTION:
        own = {"qwen": True} if embeddings is None else {}
        _, index = READ_THE_QUESTION[method](tokens, projected, question, counts.kept, **own)
        return whole[index], index
    rows, index = ON_A_GRID[method](tokens, norms, salience, counts.kept)
    return (rows if beside is None else whole[index]), index


def choose_tops(scores: Array, hidden: Array, count: int) -> list[int]:
    """The places of rows that survive a stage of `tops`."""
    return tops_rows(hidden, scores, min(count, len(hidden)))
