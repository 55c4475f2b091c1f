"""Methods that choose tokens before the LLM, in raster order and as many as the budget's mean (docs/methods.md).

A method that chooses one token a round calls a local ONNX function without a plugin, once for each token of the
largest image, because bundles may have no Loop. An image that keeps fewer tokens keeps the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Literal

import onnx_ir as ir

from sinkprune.contract.budgets import Budget
from sinkprune.export.graph import FLOAT, Graph
from sinkprune.export.pruning.equal_mean import kept_before, tokens_into_llm
from sinkprune.export.pruning.functions import ROUNDS, centred, cosines, local_function, unit_rows
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, TokenCount, as_vector, sanitizer_counts
from sinkprune.export.pruning.sanitizer import (
    TowerValues,
    ascending,
    largest,
    least_similar,
    mask_of,
    new_sanitizer,
    output_tokens,
    places,
    smallest,
)

PIVOTS = 4
SEED = 0

Count = Callable[[], TokenCount]
"""Returns k, the number of tokens of each group that are kept. Writes it into the graph if it is no constant."""
Choose = Callable[[PlanFacts, Budget, Graph, TowerValues, Count], ir.Value]
"""Writes the choice of tokens into a sanitizer for the shares of a budget. Returns their index [G,k], or [1,k] if all
groups are alike. The last argument returns k."""


def fastervlm(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Keep the tokens of largest CLS attention: FasterVLM ("[CLS] Attention is All You Need for Training-Free Visual
    Token Pruning"). CLS attention is our salience, which towers without a CLS token have too."""
    facts.check_ranked(facts.most_counts(kept).kept)
    count = k()
    return ascending(graph, largest(graph, features.salience, count), count)


def divprune(
    facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count, centring: bool = False
) -> ir.Value:
    """Keep the tokens least similar to each other, by greedy max-min cosine distance: DivPrune ("DivPrune:
    Diversity-based Visual Token Pruning for Large Multimodal Models").

    This is our DIV rule with one reserved token: the one whose largest similarity to any other is smallest. Like DIV
    it takes several tokens a round. DivPrune's own rule takes one. With `centring`, the rule of Cen-Prune: tokens
    are compared without their mean, and distinctive ones are preferred after the first.
    """
    most = facts.most_counts(kept).kept
    facts.check_ranked(most)
    op = graph.op
    tokens, preference = centred(op, features.tokens) if centring else (features.tokens, None)
    index = _loneliest(graph, tokens)
    if most > 1:
        count = k()
        left = count - 1 if isinstance(count, int) else op.Sub(count, [1])
        candidate = op.Not(mask_of(graph, features, index))
        others = least_similar(graph, facts, kept, tokens, candidate, index, left, most - 1, preference)
        index = ascending(graph, op.Concat(index, others, axis=1), count)
    return index


def dart(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Keep 4 pivots of largest norm, and for each in turn its share of the tokens least similar to it: DART ("Stop
    Looking for Important Tokens in Multimodal Language Models: Duplication Matters More").

    Shares differ by at most one token, and a token that an earlier pivot took is no candidate of a later one. DART's
    4 text pivots are keys of a decoder layer, which do not exist before the LLM.
    """
    most = facts.most_counts(kept).kept
    facts.check_ranked(most)
    op, count = graph.op, k()
    pivots = op.Min(as_vector(count), [PIVOTS])
    chosen = largest(graph, features.norms, pivots)
    similarity = cosines(op, unit_rows(op, op.Cast(features.tokens, to=FLOAT)), chosen)
    # As many steps as the largest image has pivots with a share.
    for pivot in range(min(PIVOTS, most - PIVOTS)):
        # If an image keeps fewer tokens than there are pivots, its last pivot repeats, with a share of 0.
        share = op.Max(op.Div(op.Sub(as_vector(count), [1 + pivot]), pivots), [0])
        to_pivot = op.Squeeze(op.Gather(similarity, op.Min([pivot], op.Sub(pivots, [1])), axis=2), [2])
        free = op.Where(mask_of(graph, features, chosen), float("inf"), to_pivot)
        chosen = op.Concat(chosen, smallest(graph, free, share), axis=1)
    return ascending(graph, chosen, count)


def uniform(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Keep the middle token of each of k equal parts: a baseline that ignores the content of the image."""
    op, (tokens, count) = graph.op, _n_and_k(graph, features, k)
    part = op.Unsqueeze(op.Range(0, op.Squeeze(count), 1), [0])
    return op.Div(op.Mul(op.Add(op.Mul(part, 2), 1), tokens), op.Mul(count, 2))


def random(facts: PlanFacts, kept: Budget, graph: Graph, features: TowerValues, k: Count) -> ir.Value:
    """Keep the k tokens of largest score, with scores drawn from `SEED`: another baseline. A large budget keeps all
    tokens of a small one, and images of equal N keep the same places."""
    facts.check_ranked(facts.most_counts(kept).kept)
    draw = Random(SEED)
    scores = [draw.random() for _ in range(facts.most_at_once(kept))]
    ranks = [0.0] * len(scores)
    # Ranks, because scores may tie after rounding to fp32.
    for rank, token in enumerate(sorted(range(len(scores)), key=scores.__getitem__)):
        ranks[token] = float(rank)
    op, (tokens, count) = graph.op, _n_and_k(graph, features, k)
    own = op.Slice(op.Constant(value_floats=ranks), [0], tokens, [0])
    return ascending(graph, largest(graph, op.Unsqueeze(own, [0]), count), count)


def _n_and_k(graph: Graph, features: TowerValues, k: Count) -> tuple[ir.Value, ir.Value]:
    """Return N and k, each [1] int64."""
    count, tokens = k(), graph.op.Shape(features.norms, start=1, end=2)
    return tokens, graph.op.Constant(value_ints=as_vector(count)) if isinstance(count, int) else count


def _loneliest(graph: Graph, tokens: ir.Value) -> ir.Value:
    """Return [G,1]: the token whose largest cosine with another is smallest."""
    op = graph.op
    unit = unit_rows(op, op.Cast(tokens, to=FLOAT))
    place = places(graph, unit)
    everyone = op.Expand(op.Unsqueeze(place, [0]), op.Shape(unit, start=0, end=2))
    itself = op.Equal(op.Unsqueeze(place, [0]), op.Unsqueeze(place, [1]))
    similarity = op.Where(itself, float("-inf"), cosines(op, unit, everyone))
    return smallest(graph, op.ReduceMax(similarity, [-1], keepdims=0), 1)


def build_before(
    choose: Choose, booked: Literal["reserve", "diverse"], facts: PlanFacts, budget: Budget
) -> PlanGraphs:
    """Return the plan that keeps the tokens of `choose`.

    `booked` is the field of the budget that counts them: `reserve` for methods that keep the tokens of largest
    salience, `diverse` for others.
    """
    kept = kept_before(facts, budget, **{booked: tokens_into_llm(facts, budget)})
    graph, features = new_sanitizer(facts, kept)

    def count() -> TokenCount:
        return getattr(sanitizer_counts(graph.op, facts, kept, features.norms), booked)

    output_tokens(graph, facts, kept, features, choose(facts, kept, graph, features, count))
    return PlanGraphs(kept, graph)


def best_token(op: Any, gain: ir.Value, tolerance: ir.Value | float) -> ir.Value:
    """Return [G,1]: the first token whose gain [G,N] is the largest, up to `tolerance`.

    Equal gains may differ by rounding; the tolerance makes them tie on every runtime.
    """
    equal = op.Sub(op.ReduceMax(gain, [-1], keepdims=1), tolerance)
    _, index = op.TopK(op.Min(gain, equal), [1], axis=-1, largest=1, sorted=1, _outputs=2)
    return index


def chosen_in_rounds(
    facts: PlanFacts,
    kept: Budget,
    graph: Graph,
    name: str,
    body: Callable[..., Sequence[ir.Value]],
    fixed: Sequence[ir.Value],
    state: Sequence[ir.Value],
    count: Count,
) -> ir.Value:
    """Return [G,count]: the first `count` of the tokens that as many rounds as `kept` needs choose, ascending.

    A round is the function `name`. Its `body` takes the operators, the numbers of the tokens [N], the values `fixed`
    and the `state`, the last of which is [G,N]. It returns the token [G,1] and the new state. Raises `BudgetError`
    for too many rounds.
    """
    most = facts.most_counts(kept).kept
    facts.check_rounds(most)
    function = local_function(ROUNDS, name, body, facts.dialect.OPSET)
    op, place, chosen = graph.op, places(graph, state[-1]), []
    for _ in range(most):
        index, *state = op.call(function, place, *fixed, *state)
        chosen.append(index)
    first = count()
    return ascending(graph, op.Slice(op.Concat(*chosen, axis=1), [0], as_vector(first), [1]), first)


build_fastervlm = partial(build_before, fastervlm, "reserve")
build_divprune = partial(build_before, divprune, "diverse")
build_divprune_centred = partial(build_before, partial(divprune, centring=True), "diverse")
build_dart = partial(build_before, dart, "diverse")
build_uniform = partial(build_before, uniform, "diverse")
build_random = partial(build_before, random, "diverse")
