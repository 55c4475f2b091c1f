"""The rules of docs/methods.md, slow and obvious, in numpy. The graphs are tested against these.

A method before the LLM takes one group's tokens [N,D], norms and salience [N] and the number k to keep; it returns
the kept rows [k,D] and the token each stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from support.references.reference import cosines, diversity, largest, sanitize

Array = np.ndarray[Any, Any]
Kept = tuple[Array, list[int]]


def uniform(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """The middle of each of k parts."""
    n = len(tokens)
    index = [int((part + 0.5) * n / k + 1e-9) for part in range(k)]
    return tokens[index], index


def fastervlm(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """The k most salient."""
    index = sorted(largest(salience, k))
    return tokens[index], index


def divprune(tokens: Array, norms: Array, salience: Array, k: int, batch: int = 16) -> Kept:
    """The token least like any other, then those least like what is kept."""
    similarity = cosines(tokens)
    n = len(tokens)
    closest = [max((similarity[i, j] for j in range(n) if j != i), default=-np.inf) for i in range(n)]
    first = min(range(n), key=lambda i: (closest[i], i))
    others = [i for i in range(n) if i != first]
    index = sorted([first, *diversity(tokens, others, [first], k - 1, batch)])
    return tokens[index], index


def dart(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """Four pivots of largest norm, and for each in turn its share of the tokens least like it."""
    similarity = cosines(tokens)
    pivots = largest(norms, min(4, k))
    index = list(pivots)
    for turn, pivot in enumerate(pivots):
        share = len(range(turn, k - len(pivots), len(pivots)))
        free = [i for i in range(len(tokens)) if i not in index]
        index += sorted(free, key=lambda i: (similarity[i, pivot], i))[:share]
    index = sorted(index)
    return tokens[index], index


def visionzip(
    tokens: Array,
    norms: Array,
    salience: Array,
    k: int,
    *,
    filtered: bool = False,
    contextual: int | None = None,
    beside: Array | None = None,
) -> Kept:
    """Dominant tokens by salience, then evenly spaced others, each with the mean of those most like it added.

    `contextual` of the k are merged, 10/64 unless given. `beside` [N,E] is what goes with each token: it stands
    behind its token in the rows that are given, and nothing is compared by it.
    """
    n = len(tokens)
    outliers = largest(norms, max(1, -(-n // 100))) if filtered else []
    usable = [i for i in range(n) if i not in outliers]
    k = min(k, len(usable))
    contextual = k * 10 // 64 if contextual is None else contextual
    dominant = sorted(usable[i] for i in largest(salience[usable], k - contextual))
    rest = [i for i in usable if i not in dominant]
    targets = [rest[i * (len(rest) // contextual)] for i in range(contextual)]
    similarity = cosines(tokens)
    members: dict[int, list[int]] = {target: [] for target in targets}
    for i in rest:
        if targets and i not in targets:
            # max takes the first of equals
            members[max(targets, key=lambda target: similarity[i, target])].append(i)
    whole = tokens if beside is None else np.concatenate([tokens, beside], axis=-1)
    rows = [whole[i].astype(np.float64) for i in dominant]
    for target in targets:
        mean = whole[members[target]].astype(np.float64).mean(axis=0) if members[target] else 0.0
        rows.append(whole[target] + mean)
    return np.array(rows).astype(tokens.dtype), [*dominant, *targets]


def visionzip_filter(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """VisionZip of what the outliers leave."""
    return visionzip(tokens, norms, salience, k, filtered=True)


def no_text_pruner(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """The sanitizer with k - 1 tokens behind the sink, half of them diverse."""
    diverse = (k - 1) // 2
    return sanitize(tokens, norms, salience, reserve=k - 1 - diverse, diverse=diverse)


def downsample(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """The means of k blocks of the grid, in raster order, each for the token in its middle."""
    side = math.isqrt(len(tokens))
    height, width = (side, side) if side * side == len(tokens) else (1, len(tokens))
    lines = min(height, round(math.sqrt(k)))
    rows, index = [], []
    for line in range(lines):
        top, bottom = line * height // lines, (line + 1) * height // lines
        blocks = (line + 1) * k // lines - line * k // lines
        for block in range(blocks):
            left, right = block * width // blocks, (block + 1) * width // blocks
            own = [tokens[row * width + column] for row in range(top, bottom) for column in range(left, right)]
            rows.append(np.mean(np.array(own, np.float64), axis=0))
            index.append((top + bottom - 1) // 2 * width + (left + right - 1) // 2)
    return np.array(rows).astype(tokens.dtype), index


def text_scores(salience: Array, embeddings: Array, question: Array, outliers: list[int]) -> Array:
    """The scores [N] by which `sinkpruner-text` takes tokens: scaled salience plus scaled relevance.

    The relevance is the mean cosine of a token's row in `embeddings` [N,d] with the rows of `question` [T,d].
    """
    relevance = np.zeros(len(embeddings), np.float32)
    for number, row in enumerate(embeddings.astype(np.float64)):
        lengths = [np.linalg.norm(row) * np.linalg.norm(word.astype(np.float64)) for word in question]
        found = [row @ word / length if length else 0.0 for word, length in zip(question, lengths, strict=True)]
        relevance[number] = sum(found) / len(found)
    scores = np.zeros(len(salience), np.float32)
    for values in (salience.astype(np.float32), relevance):
        low = [value for number, value in enumerate(values) if number not in outliers]
        scores += (values - min(low)) / max(max(low) - min(low), np.float32(1e-30))
    return scores


def cdpruner(tokens: Array, embeddings: Array, question: Array, k: int, *, qwen: bool = False) -> Kept:
    """The greedy maximum of a determinant of cosines, weighted by relevance to the `question` [T,d].

    The gain of a token is what the tokens taken leave of its own entry of the kernel: a Schur complement, solved anew
    in each round. Relevances and gains are equal up to 2**-18, and tokens without gain leave the others' as they are.
    """
    relevance = np.mean(_cosines_between(embeddings, question), axis=1)
    spread = relevance.max() - relevance.min()
    relevance = (relevance - relevance.min()) / spread if spread > 2.0**-18 else np.ones(len(relevance))
    kernel = relevance[:, None] * cosines(embeddings) * relevance
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


BEFORE_LLM = {
    "uniform": uniform,
    "fastervlm": fastervlm,
    "divprune": divprune,
    "dart": dart,
    "visionzip": visionzip,
    "visionzip+filter": visionzip_filter,
    "sinkpruner-no-text-pruner": no_text_pruner,
}
"""Methods that drop tokens before the LLM only; `random` is no rule."""
READ_THE_QUESTION = {"cdpruner": cdpruner, "mmtok": mmtok}
"""Methods that drop tokens before the LLM only. They also take the rows of tokens and words that the LLM receives."""
ON_A_GRID = {**BEFORE_LLM, "downsample": downsample}
"""Those of families whose pictures all have as many tokens. In others `downsample` makes the picture smaller."""


def rows_like_the_image(hidden: Array, visual: list[int], text: list[int]) -> list[int]:
    """The text rows of `hidden` [S,d] whose mean cosine with the visual rows exceeds the text's mean; else all."""
    text = text or [len(hidden) - 1]
    if not visual:
        return text
    similarity = cosines(hidden)
    image = {row: float(np.mean([similarity[row, j] for j in visual])) for row in text}
    mean = np.mean(list(image.values()))
    return [row for row in text if image[row] > mean + 1e-9] or text


def asking_rows(method: str, hidden: Array, visual: list[int], text: list[int]) -> list[int]:
    """The rows whose attention scores the visual rows."""
    return IN_LLM[method].asking(hidden, visual, text) if method in IN_LLM else text


class InLlm(NamedTuple):
    """A method that drops tokens inside the LLM only."""

    cuts: tuple[int, ...]
    """The 0-based layers of 32 after which it drops tokens."""
    asking: Callable[[Array, list[int], list[int]], list[int]]
    """Returns the rows whose attention scores the visual rows, of the hidden states, visual rows and text rows."""


def _last_row(hidden: Array, visual: list[int], text: list[int]) -> list[int]:
    return [len(hidden) - 1]


IN_LLM = {
    "fastv": InLlm((2,), _last_row),
    "pyramiddrop": InLlm((8, 16, 24), _last_row),
    "sparsevlm": InLlm((2, 6, 15), rows_like_the_image),
}
CANNOT_REACH_ALL = {**{method: own.cuts for method, own in IN_LLM.items()}, "sinkpruner-no-sanitizer": (2, 6, 15)}
"""The layers of 32 after which methods drop tokens that run their first layers on all tokens."""
