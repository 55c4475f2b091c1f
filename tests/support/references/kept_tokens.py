"""The tokens that a sanitizer of any method keeps of a group, by its reference, and a graph compared with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sinkprune.contract.budgets import Budget, Counts
from sinkprune.contract.precision import DTYPES
from sinkprune.export.methods import METHODS as ALL_METHODS
from support.models.graphs import Run
from support.references.reference import largest, sanitize
from support.references.reference_methods import (
    IN_LLM,
    ON_A_GRID,
    READ_THE_QUESTION,
    text_scores,
    tops_rows,
    visionzip,
    vscan,
)

Array = np.ndarray[Any, Any]
SANITIZING = [
    method
    for method in ALL_METHODS
    # `random` is no rule.
    if method not in (*IN_LLM, "sinkpruner-no-sanitizer", "random")
]
"""The methods whose sanitizers have a reference."""
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-3}


def kept_of(
    method: str,
    counts: Counts,
    features: list[Array],
    question: Array,
    *,
    beside: Array | None = None,
    embeddings: Array | None = None,
    any_size: bool = False,
) -> tuple[Array, list[int]]:
    """The rows [n0,D'] and the tokens that a method with a sanitizer keeps; `beside` [N,E] goes with the tokens.

    `question` [T,d] are its words as the decoder receives them, and `embeddings` [N,d] the tokens as it does; None
    where the tower projects them. Pictures of `any_size` are those of Qwen's families.
    """
    tokens, norms, salience = features
    whole = tokens if beside is None else np.concatenate([tokens, beside], axis=-1)
    projected = tokens if embeddings is None else embeddings
    if method == "sinkpruner-text":
        salience = text_scores(salience, projected, question, largest(norms, counts.outliers))
    if method.startswith("visionzip"):
        options = {"filtered": method != "visionzip", "contextual": counts.diverse, "beside": beside}
        return visionzip(tokens, norms, salience, counts.kept, **options)  # type: ignore[arg-type]
    if method == "vscan":
        side = math.isqrt(len(tokens))
        # Pictures of one size have a square of tokens.
        side = None if any_size or side**2 != len(tokens) else side
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
            remove_outliers=counts.outliers > 0,
            aggregate=counts.sink > 0,
            rounds=1 if method == "sinkpruner-paper" else 8,
            centring=method.endswith("+centred"),
        )
        rows = whole[index]
        if counts.sink:
            outliers = np.argsort(-norms, kind="stable")[: counts.outliers]
            rows[0] = whole[outliers].astype(np.float64).mean(axis=0)
        return rows, index
    if method in READ_THE_QUESTION:
        _, index = READ_THE_QUESTION[method](tokens, projected, question, counts.kept, qwen=any_size)
        return whole[index], index
    rows, index = ON_A_GRID[method](tokens, norms, salience, counts.kept)
    return (rows if beside is None else whole[index]), index


def choose_tops(scores: Array, hidden: Array, count: int) -> list[int]:
    """The places of rows that survive a stage of `tops`."""
    return tops_rows(hidden, scores, min(count, len(hidden)))


def assert_keeps(
    run: Run,
    method: str,
    kept: Budget,
    inputs: Mapping[str, Array],
    precision: str = "fp32",
    *,
    any_size: bool = False,
) -> list[list[int]]:
    """That a sanitizer of the shares `kept` keeps of each group what its reference keeps; returns the tokens of each.

    `inputs` are a tower's outputs, with the rows `embeddings` and `question` for methods that read them.
    """
    dtypes = dict.fromkeys(("norms", "salience"), np.dtype(np.float32))
    inputs = {name: array.astype(dtypes.get(name, DTYPES[precision])) for name, array in inputs.items()}
    out, counts = run(**inputs), kept.resolve(inputs["tokens"].shape[1])
    for group, index in enumerate(out["kept_index"].tolist()):
        features = [inputs[name][group] for name in ("tokens", "norms", "salience")]
        beside = inputs["deepstack"][group] if "deepstack" in inputs else None
        rows, expected = kept_of(
            method,
            counts,
            features,
            inputs["question"],
            beside=beside,
            embeddings=inputs["embeddings"][group],
            any_size=any_size,
        )
        assert index == expected and len({*index}) == len(index) == counts.kept
        found = [out[name][group] for name in ("kept_tokens", "kept_deepstack") if name in out]
        assert {array.dtype for array in found} == {inputs["tokens"].dtype}
        scale, tolerance = np.abs(rows).max(initial=0).astype(np.float64), TOLERANCE[precision]
        np.testing.assert_allclose(np.concatenate(found, axis=-1), rows, rtol=tolerance, atol=tolerance * scale)
    return out["kept_index"].tolist()
