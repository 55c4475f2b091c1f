"""The selection rules of method.md, slow and obvious, in numpy. The graphs are tested against these."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkprune.contract.budgets import Budget, prune_layers

Array = np.ndarray[Any, Any]


def largest(values: Array, count: int) -> list[int]:
    """Indices of the `count` largest values, ties to the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def cosines(tokens: Array) -> Array:
    """[N,N] cosines of the rows; 0 with a zero row."""
    rows = tokens.astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    # What differs by the rounding of this arithmetic only is a tie.
    return np.round(unit @ unit.T, 12)


def centred(tokens: Array) -> tuple[Array, Array]:
    """The rows without their mean, and how distinctive each is, from 0 to 1: its mean cosine with all, negated."""
    rows, similar = tokens.astype(np.float64), cosines(tokens).mean(axis=1)
    spread = similar.max() - similar.min()
    distinctive = (similar.max() - similar) / spread if spread > 2.0**-18 else np.ones(len(rows))
    return rows - rows.mean(axis=0), distinctive


def diversity(
    tokens: Array, candidates: list[int], kept: list[int], count: int, rounds: int, preference: Array | None = None
) -> list[int]:
    """Rule 4: `count` candidates least similar to what is kept, in `rounds` rounds or more.

    With a preference [N]: of largest preference times distance, in steps of 2**-16.
    """
    batch = min(16, count // rounds) or 1
    similarity = cosines(tokens)
    kept, remaining, chosen = list(kept), list(candidates), []
    while len(chosen) < count:
        closeness = {x: max((similarity[x, s] for s in kept), default=-np.inf) for x in remaining}
        if preference is not None:
            closeness = {x: np.round(preference[x] * (max(c, -1) - 1) * 2**16) for x, c in closeness.items()}
        order = sorted(remaining, key=lambda x: (closeness[x], x))
        taken = order[: min(batch, count - len(chosen))]
        chosen += taken
        kept += taken
        remaining = [x for x in remaining if x not in taken]
    return chosen


def one_stage(budget: Budget, tokens: int, num_layers: int, nominal: int | None = None) -> dict[int, int]:
    """What the default's stage keeps of `tokens` visual tokens, by its layer: the mean of the paper's three stages.

    With `nominal`, the mean is of so many tokens, and the stage keeps that share of `tokens`.
    """
    cuts, whole = prune_layers(num_layers), nominal or tokens
    counts = budget.resolve(whole)
    visible, after = counts.kept, []
    for layer in range(num_layers):
        if layer > cuts[0]:
            after.append(visible)
        if layer in cuts:
            visible = min(visible, counts.stages[cuts.index(layer)])
    mean = int(sum(after) / len(after) + 0.5)
    return {cuts[0]: max(1, tokens * mean // whole)}


def sanitize(
    tokens: Array,
    norms: Array,
    salience: Array,
    *,
    reserve: int,
    diverse: int,
    per_mille: int = 10,
    rounds: int = 8,
    remove_outliers: bool = True,
    aggregate: bool = True,
    raster: bool = False,
    centring: bool = False,
) -> tuple[Array, list[int]]:
    """Rules 1 to 5 for one group [N,D]: the kept tokens [n0,D] and their source indices."""
    n = len(tokens)
    outliers = largest(norms, max(1, -(-n * per_mille // 1000))) if remove_outliers else []
    low = [i for i in range(n) if i not in outliers]
    reserve = min(reserve, len(low))
    diverse = min(diverse, len(low) - reserve)
    res = [low[i] for i in largest(salience[low], reserve)]
    compared, preference = centred(tokens) if centring else (tokens, None)
    div = diversity(compared, [i for i in low if i not in res], res, diverse, rounds, preference)
    index = sorted(res + div) if raster else sorted(res) + sorted(div)
    kept = tokens[index]
    if outliers and aggregate:
        sink = tokens[outliers].astype(np.float64).mean(axis=0).astype(tokens.dtype)
        kept, index = np.concatenate([sink[None], kept]), [outliers[0], *index]
    return kept, index


def sanitize_at(budget: Budget, tokens: Array, norms: Array, salience: Array, **rule: Any) -> tuple[Array, list[int]]:
    """What the sanitizer of a budget keeps of one group, as `sanitize`; all tokens if the budget has none.

    `rule` are arguments of `sanitize` in the place of the budget's.
    """
    n = len(norms)
    if not budget.sanitizer:
        return tokens, list(range(n))
    own = {
        "reserve": budget.reserve.of(n),
        "diverse": budget.diverse.of(n),
        "rounds": budget.diversity_rounds,
        "per_mille": budget.outlier_per_mille,
        "remove_outliers": budget.remove_outliers,
        "aggregate": budget.aggregate,
        "raster": budget.order == "raster",
    }
    return sanitize(tokens, norms, salience, **{**own, **rule})


def beside_kept(beside: Array, norms: Array, index: list[int], *, sink: bool, per_mille: int = 10) -> Array:
    """[sets,n0,d]: what of `beside` [sets,N,d] goes with the kept tokens `index`, whose first may be a sink."""
    kept = beside[:, index].copy()
    if sink:
        outliers = largest(norms, max(1, -(-len(norms) * per_mille // 1000)))
        for number, own in enumerate(beside):
            kept[number, 0] = own[outliers].astype(np.float64).mean(axis=0)
    return kept


def text_attention(
    query: Array, key: Array, visual: list[int], text: list[int], *, visual_keys: bool = False, causal: bool = True
) -> Array:
    """p [V] of section 2 from query [H,S,h] and key [Hkv,S,h], the mean over heads."""
    if not visual:
        return np.zeros(0)
    query, key = query.astype(np.float64), key.astype(np.float64)
    received = np.zeros(key.shape[1])
    text = text or [query.shape[1] - 1]
    for head in range(len(query)):
        keys = key[head * len(key) // len(query)]
        for row in text:
            # Row by row, so that equal keys get equal scores.
            logits = (keys * query[head, row]).sum(axis=1) / np.sqrt(query.shape[2])
            visible = np.arange(len(keys)) <= (row if causal else len(keys))
            if visual_keys:
                visible &= np.isin(np.arange(len(keys)), visual)
            logits = np.where(visible, logits, -np.inf)
            weights = np.exp(logits - logits.max())
            received += weights / weights.sum()
    return received[np.array(visual, dtype=int)] / (len(query) * len(text))


def keep_rows(scores: Array, rows: int, visual: list[int], kept: int) -> list[int]:
    """The rows that survive a stage: all but the visual rows of smallest score."""
    best = {visual[i] for i in largest(scores, min(kept, len(visual)))}
    return [row for row in range(rows) if row not in visual or row in best]
