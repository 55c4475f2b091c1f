"""The rules of docs/methods.md that read the question, slow and obvious, in numpy, for tests of the graphs."""

from __future__ import annotations

from functools import partial

import numpy as np

from support.references.reference import centred, cosines
from support.references.reference_methods import Array, Kept


def text_scores(salience: Array, embeddings: Array, question: Array, outliers: list[int]) -> Array:
    """The scores [N] by which the methods of `READING_SANITIZERS` take tokens: scaled salience plus scaled relevance.

    The relevance is the mean cosine of a token's row in `embeddings` [N,d] with the rows of `question` [T,d].
    """
    relevance = np.zeros(len(embeddings), np.float32)
    for number, row in enumerate(embeddings.astype(np.float64)):
        lengths = [np.linalg.norm(row) * np.linalg.norm(word.astype(np.float64)) for word in question]
        found = [row @ word / length if length else 0.0 for word, length in zip(question, lengths, strict=True)]
        relevance[number] = sum(found) / len(found)
    scores = np.zeros(len(salience), np.float32)
    for values in (salience.astype(np.float32), relevance):
        low = [value for number, value in enumerate(values) if number not in outliers] or [values[0]]
        scores += (values - min(low)) / max(max(low) - min(low), np.float32(1e-30))
    return scores


def cdpruner(
    tokens: Array, embeddings: Array, question: Array, k: int, *, qwen: bool = False, centring: bool = False
) -> Kept:
    """The greedy maximum of a determinant of cosines, weighted by relevance to the `question` [T,d].

    The gain of a token is what the tokens taken leave of its own entry of the kernel: a Schur complement, solved anew
    in each round. Relevances and gains are equal up to 2**-18, and tokens without gain leave the others' as they are.
    """
    relevance = np.mean(_cosines_between(embeddings, question), axis=1)
    spread = relevance.max() - relevance.min()
    relevance = (relevance - relevance.min()) / spread if spread > 2.0**-18 else np.ones(len(relevance))
    compared = embeddings
    if centring:
        compared, distinctive = centred(embeddings)
        relevance *= distinctive
    kernel = relevance[:, None] * cosines(compared) * relevance
    index: list[int] = []
    taken: list[int] = []
    while len(index) < k:
        explained = np.zeros(len(kernel))
        if taken:
            solved = np.linalg.solve(kernel[np.ix_(taken, taken)], kernel[taken])
            explained = (kernel[taken] * solved).sum(axis=0)
        gain = kernel.diagonal() - explained
        index.append(_first_best(gain, index, 2.0**-18))
        taken += [index[-1]] if gain[index[-1]] > 2.0**-18 else []
    index = sorted(index)
    return tokens[index], index


def mmtok(tokens: Array, embeddings: Array, question: Array, k: int, *, qwen: bool = False) -> Kept:
    """The greedy maximum of the coverage of the words of the `question` [T,d] and of all tokens.

    Gains are equal up to 2**-16 of the largest in the first round.
    """
    of_words = _shares(_cosines_between(question, embeddings) / (0.01 if qwen else 0.02))
    of_tokens = _shares(cosines(tokens) / 0.2)

    def coverage(kept: list[int]) -> float:
        words, others = (shares[:, kept].max(axis=1, initial=0.0).mean() for shares in (of_words, of_tokens))
        return float(words + 0.5 * others)

    index: list[int] = []
    tolerance = 0.0
    while len(index) < k:
        gain = np.array([coverage([*index, token]) for token in range(len(tokens))]) - coverage(index)
        tolerance = tolerance or gain.max() * 2.0**-16
        index.append(_first_best(gain, index, tolerance))
    index = sorted(index)
    return tokens[index], index


def _first_best(gain: Array, taken: list[int], tolerance: float) -> int:
    free = [token for token in range(len(gain)) if token not in taken]
    best = max(gain[token] for token in free)
    return next(token for token in free if gain[token] >= best - tolerance)


def _cosines_between(rows: Array, others: Array) -> Array:
    return cosines(np.concatenate([rows, others]).astype(np.float64))[: len(rows), len(rows) :]


def _shares(logits: Array) -> Array:
    """The softmax over each row."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


READ_THE_QUESTION = {"cdpruner": cdpruner, "cdpruner+centred": partial(cdpruner, centring=True), "mmtok": mmtok}
"""Methods that drop tokens before the LLM only. They also take the rows of tokens and words that the LLM receives."""
READING_SANITIZERS = ("sinkpruner-text", "sinkpruner-text-heads")
"""SinkPruner's methods whose sanitizer takes tokens by `text_scores`."""
