"""The rules of docs/methods.md, slow and obvious, in numpy. The graphs are tested against these.

A method before the LLM takes one group's tokens [N,D], norms and salience [N] and the number k to keep; it returns
the kept rows [k,D] and the token each stands for. Some read the question too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from support.references.reference import centred, cosines, diversity, largest, sanitize

Array = np.ndarray[Any, Any]
Kept = tuple[Array, list[int]]


def rows_of(tokens: Array, index: list[int]) -> Kept:
    """The tokens of an index, in raster order."""
    index = sorted(index)
    return tokens[index], index


def uniform(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """The middle of each of k parts."""
    n = len(tokens)
    return rows_of(tokens, [int((part + 0.5) * n / k + 1e-9) for part in range(k)])


def fastervlm(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """The k most salient."""
    return rows_of(tokens, largest(salience, k))


def divprune(tokens: Array, norms: Array, salience: Array, k: int, *, centring: bool = False) -> Kept:
    """The token least like any other, then those least like what is kept; with `centring`, Cen-Prune's rule."""
    compared, preference = centred(tokens) if centring else (tokens, None)
    similarity = cosines(compared)
    n = len(tokens)
    closest = [max((similarity[i, j] for j in range(n) if j != i), default=-np.inf) for i in range(n)]
    first = min(range(n), key=lambda i: (closest[i], i))
    others = [i for i in range(n) if i != first]
    return rows_of(tokens, [first, *diversity(compared, others, [first], k - 1, 8, preference)])


def dart(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """Four pivots of largest norm, and for each in turn its share of the tokens least like it."""
    similarity = cosines(tokens)
    pivots = largest(norms, min(4, k))
    index = list(pivots)
    for turn, pivot in enumerate(pivots):
        share = len(range(turn, k - len(pivots), len(pivots)))
        free = [i for i in range(len(tokens)) if i not in index]
        index += sorted(free, key=lambda i: (similarity[i, pivot], i))[:share]
    return rows_of(tokens, index)


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
    members = joined(tokens, [i for i in rest if i not in targets], targets)
    whole = tokens if beside is None else np.concatenate([tokens, beside], axis=-1)
    rows = [whole[i].astype(np.float64) for i in dominant]
    for target in targets:
        mean = whole[members[target]].astype(np.float64).mean(axis=0) if members[target] else 0.0
        rows.append(whole[target] + mean)
    return np.array(rows).astype(tokens.dtype), [*dominant, *targets]


def joined(tokens: Array, others: list[int], targets: list[int]) -> dict[int, list[int]]:
    """By target, those of the `others` that are most like it; ties go to the first target."""
    similarity, members = cosines(tokens), {target: list[int]() for target in targets}
    for i in others if targets else ():
        members[max(targets, key=lambda target: similarity[i, target])].append(i)
    return members


def prunesid(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """Groups by principal components; no near-duplicates within a group; a share for each, the most salient."""
    n, order = len(tokens), largest(salience, len(salience))
    groups: list[list[int]] = [[] for _ in range(min(16, max(1, k // 4)))]
    weights = components(tokens, len(groups))
    for i in order:
        groups[int(np.argmax(np.abs(weights[i]) * (1 - np.arange(len(groups)) / 4096)))].append(i)

    similarity = cosines(tokens)
    mean = sum(similarity[i, j] for i in range(n) for j in range(i)) / max(1, n * (n - 1) // 2)
    free: list[list[int]] = []
    for group in groups:
        free.append([])
        for i in group:
            if not any(similarity[i, j] > k / 32 * mean + 1 / 4096 for j in free[-1]):
                free[-1].append(i)

    found = sum(len(group) for group in free)
    more = [max(0, len(group) - 1) for group in free]
    wanted = min(k, found) - sum(1 for group in free if group)
    index, until = [], 0
    for group, others in zip(free, more, strict=True):
        end = until + others
        share = end * wanted // max(1, sum(more)) - until * wanted // max(1, sum(more))
        index += group[: 1 + share]
        until = end
    index += [i for i in order if i not in index][: k - len(index)]
    return rows_of(tokens, index)


def components(tokens: Array, count: int) -> Array:
    """[N,count]: columns after three subspace iterations, near the principal components of the tokens."""
    n = len(tokens)
    with np.errstate(over="ignore"):
        x = 1 / (1 + np.exp(-tokens.astype(np.float64)))
    x -= x.mean(axis=1, keepdims=True)
    gram = x @ x.T
    gram /= np.trace(gram) or 1.0
    columns = gram[:, [i * n // count for i in range(count)]]
    for _ in range(2):
        columns = gram @ gram_schmidt(columns)
    return gram_schmidt(columns)


def gram_schmidt(columns: Array) -> Array:
    """Orthonormal columns; zero for one that all but depends on those before."""
    units: list[Array] = []
    for column in columns.T:
        left = column
        for unit in units:
            left = left - unit * (unit @ left)
        length = np.linalg.norm(left)
        units.append(left / length if length > 1e-3 * np.linalg.norm(column) + 1e-30 else np.zeros(len(left)))
    return np.array(units).T


def vscan(
    tokens: Array,
    norms: Array,
    salience: Array,
    k: int,
    *,
    local: int | None = None,
    side: int | None = None,
    beside: Array | None = None,
) -> Kept:
    """The most salient of each window, then of all; every other token is averaged with the kept one most like it.

    `local` tokens of the k, half unless given, are of windows. `side` is that of a square grid, None for tokens in
    one line. `beside` is as in `visionzip`.
    """
    n, local = len(tokens), k // 2 if local is None else local
    across = 1 if local == 0 else math.isqrt(min(local, 16)) if side else min(local, 16)
    windows: dict[tuple[int, int], list[int]] = {}
    for i in range(n):
        window = (i // side * across // side, i % side * across // side) if side else (0, i * across // n)
        windows.setdefault(window, []).append(i)
    number = across**2 if side else across
    kept = [own[i] for own in windows.values() for i in largest(salience[own], local // number)]
    rest = [i for i in range(n) if i not in kept]
    kept = sorted(kept + [rest[i] for i in largest(salience[rest], k - len(kept))])

    members = joined(tokens, [i for i in range(n) if i not in kept], kept)
    whole = tokens if beside is None else np.concatenate([tokens, beside], axis=-1)
    rows = [whole[[target, *members[target]]].astype(np.float64).mean(axis=0) for target in kept]
    return np.array(rows).astype(tokens.dtype), kept


def scope(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """One token after the other: that of largest salience times what it adds to the cosines that others have with
    the kept ones. Products within 2**-16 of the first round's largest are equal."""
    similarity = np.maximum(cosines(tokens), 0)
    scaled = salience.astype(np.float64) / (np.abs(salience).max() or 1.0)
    index: list[int] = []
    tolerance = 0.0
    while len(index) < k:
        covered = similarity[index].max(axis=0, initial=0.0)
        products = scaled * np.maximum(similarity - covered, 0).sum(axis=1)
        tolerance = tolerance or 2.0**-16 * np.abs(products).max()
        index.append(_first_best(products, index, tolerance))
    return rows_of(tokens, index)


def vispruner(tokens: Array, norms: Array, salience: Array, k: int) -> Kept:
    """Half by salience. Of the rest, in order of salience, every second token is compared with the others, and the
    most similar are dropped, eight at a time, until as many are left as are wanted. Cosines above 1 - 2**-18 tie."""
    similarity = np.minimum(cosines(tokens), 1 - 2.0**-18)
    order = largest(salience, len(salience))
    kept, rest, wanted = order[: k // 2], order[k // 2 :], k - k // 2
    while len(rest) > wanted:
        first, second = rest[::2], rest[1::2]
        nearest = {i: similarity[i, second].max(initial=-np.inf) for i in first}
        dropped = sorted(first, key=lambda i: -nearest[i])[: min(8, len(rest) - wanted)]
        rest = [i for i in rest if i not in dropped]
    return rows_of(tokens, kept + rest)


def tops_rows(rows: Array, relevance: Array, k: int) -> list[int]:
    """The rows of TOPS, ascending: first the most relevant, then by relevance + (coverage + distance) / 2. Each is
    scaled to 0 to 1 over the rows that are left. Scores within 2**-12 are equal, and cosines above 1 - 2**-18."""
    similarity = np.minimum(cosines(rows), 1 - 2.0**-18)
    relevance = relevance.astype(np.float64) / (np.abs(relevance).max(initial=0) or 1.0)
    free, taken = [*range(len(rows))], list[int]()

    def scaled(values: Array, least: float) -> Array:
        return (values - values[free].min()) / max(np.ptp(values[free]), least)

    relevant = scaled(relevance, 1e-30)
    while len(taken) < k:
        scores = relevant
        if taken:
            closest = similarity[:, taken].max(axis=1)
            gain = np.maximum(similarity - closest, 0).sum(axis=1)
            scores = relevant + (scaled(gain, 2.0**-10) + scaled(1 - closest, 2.0**-10)) / 2
        taken.append(next(i for i in free if scores[i] >= scores[free].max() - 2.0**-12))
        free.remove(taken[-1])
    return sorted(taken)


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


BEFORE_LLM = {
    "uniform": uniform,
    "fastervlm": fastervlm,
    "divprune": divprune,
    "divprune+centred": partial(divprune, centring=True),
    "dart": dart,
    "visionzip": visionzip,
    "visionzip+filter": partial(visionzip, filtered=True),
    "sinkpruner-no-text-pruner": no_text_pruner,
    "prunesid": prunesid,
    "scope": scope,
    "vispruner": vispruner,
}
"""Methods that drop tokens before the LLM only; `random` is no rule."""
ON_A_GRID = {**BEFORE_LLM, "downsample": downsample, "downsample-ttft": downsample}
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
    own = {**IN_LLM, **TWO_STAGES}.get(method)
    return own.asking(hidden, visual, text) if own else text


class InLlm(NamedTuple):
    """How a method drops tokens inside the LLM."""

    cuts: tuple[int, ...]
    """The 0-based layers of 32 after which it drops tokens."""
    asking: Callable[[Array, list[int], list[int]], list[int]]
    """Returns the rows whose attention scores the visual rows, of the hidden states, visual rows and text rows."""


def _last_row(hidden: Array, visual: list[int], text: list[int]) -> list[int]:
    return [len(hidden) - 1]


IN_LLM = {"fastv": InLlm((2,), _last_row), "sparsevlm": InLlm((2, 6, 15), rows_like_the_image)}
"""Methods that drop tokens inside the LLM only."""
TWO_STAGES = {"vscan": InLlm((16,), _last_row), "tops": InLlm((12, 24), rows_like_the_image)}
"""Methods that drop tokens before the LLM too."""
CANNOT_REACH_ALL = {**{method: own.cuts for method, own in IN_LLM.items()}, "sinkpruner-no-sanitizer": (2, 6, 15)}
"""The layers of 32 after which methods drop tokens that run their first layers on all tokens."""


def text_scores(salience: Array, embeddings: Array, question: Array, outliers: list[int]) -> Array:
    """The scores [N] by which `sinkpruner-text` takes tokens: scaled salience plus scaled relevance.

    The relevance is the mean cosine of a token's row in `embeddings` [N,d] with the rows of `question` [T,d].
    """
    relevance = np.mean(_cosines_between(embeddings, question), axis=1).astype(np.float32)
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
    return rows_of(tokens, index)


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
    return rows_of(tokens, index)


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
