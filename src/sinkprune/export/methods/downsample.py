"""A smaller picture: the cheapest way to fewer visual tokens, which every method must beat (docs/methods.md).

A tower of any resolution reads a smaller picture: of as many tokens as the budget's mean (`downsample`), or of as
many as take the same FLOPs to the first token (`downsample-ttft`). A tower of one resolution reads its own picture,
and tokens are averaged over blocks of its grid.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import isqrt

from sinkprune.contract.budgets import Budget, Counts, prune_layers
from sinkprune.contract.flops import prefill_flops
from sinkprune.contract.schedule import PictureSchedule
from sinkprune.export.graph import FLOAT
from sinkprune.export.pruning.equal_mean import kept_before, shares_of, tokens_into_llm
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, VariableTokens
from sinkprune.export.pruning.sanitizer import in_every_group, new_sanitizer, output_rows

_TEXT = 64
"""Tokens of text in the request whose FLOPs to the first token are compared."""


def build(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the plan whose pictures have as many tokens as the budget keeps on average."""
    facts.check_grid(budget)
    count = tokens_into_llm(facts, budget)
    if isinstance(facts.tokens, VariableTokens):
        # `Plan.picture_share` is the share of a plan without graphs.
        share = shares_of(facts, budget, Counts(0, 0, reserve=count, diverse=0, stages=()))
        return PlanGraphs(replace(share, sanitizer=False))

    kept = kept_before(facts, budget, diverse=count)
    blocks = grid_blocks(facts.tokens, count)
    graph, features = new_sanitizer(facts, kept)
    op = graph.op
    block_of = sorted((token, number) for number, block in enumerate(blocks) for token in block)
    places = op.Constant(value_ints=[number for _, number in block_of])
    member = op.Cast(op.Equal(places, op.Unsqueeze(op.Range(0, count, 1), [-1])), to=FLOAT)
    sums = op.MatMul(member, op.Cast(features.rows, to=FLOAT))
    means = op.Div(sums, op.Unsqueeze(op.ReduceSum(member, [1], keepdims=0), [-1]))
    index = op.Constant(value_ints=[_middle(block, facts.tokens) for block in blocks])
    index = in_every_group(graph, features, op.Unsqueeze(index, [0]))
    output_rows(graph, facts, kept, op.CastLike(means, features.tokens), index)
    return PlanGraphs(kept, graph)


def build_for_ttft(facts: PlanFacts, budget: Budget) -> PlanGraphs:
    """Return the plan whose pictures take as many FLOPs to the first token as SinkPruner at the budget.

    The tower saves time too, so a picture keeps more tokens than with `build`. The share of tokens is that of the
    largest picture with `_TEXT` tokens of text. A tower of one resolution saves none: its plan is that of `build`.
    """
    if not isinstance(facts.tokens, VariableTokens):
        return build(facts, budget)
    if facts.tokens.tower_flops is None:
        raise ValueError("the FLOPs of the vision tower are not known")
    most, lm, tower = facts.tokens.most, facts.language_model, facts.tokens.tower_flops
    layers = range(lm.num_layers)
    pruned = PictureSchedule.of(budget.resolve(most), 1, prune_layers(lm.num_layers))
    wanted = tower(most) + prefill_flops(lm, [_TEXT + pruned.reaching(layer) for layer in layers])

    def flops(count: int) -> int:
        tokens = most * count // facts.nominal_tokens
        return tower(tokens) + prefill_flops(lm, [_TEXT + tokens for _ in layers])

    count = max(1, bisect_right(range(facts.nominal_tokens + 1), wanted, key=flops) - 1)
    share = shares_of(facts, budget, Counts(0, 0, reserve=count, diverse=0, stages=()))
    return PlanGraphs(replace(share, sanitizer=False))


def grid_blocks(tokens: int, count: int) -> list[list[int]]:
    """Return the tokens of each of `count` blocks, in raster order.

    The grid is square. Blocks form about as many lines as each line has blocks. Lines differ by one block at most,
    because no square grid of blocks has, say, 68 of them. If `tokens` is no square number, the grid is one line.
    """
    side = isqrt(tokens)
    height, width = (side, side) if side**2 == tokens else (1, tokens)
    lines = min(height, round(count**0.5))
    found = []
    for line in range(lines):
        rows = _part(line, lines, height)
        across = len(_part(line, lines, count))
        for place in range(across):
            columns = _part(place, across, width)
            found.append([row * width + column for row in rows for column in columns])
    return found


def _part(number: int, parts: int, whole: int) -> range:
    """Return one of `parts` parts of 0 to `whole`, as equal as whole numbers allow."""
    return range(number * whole // parts, (number + 1) * whole // parts)


def _middle(block: list[int], tokens: int) -> int:
    """Return the token in the middle of a block, which stands for it in drawings."""
    side = isqrt(tokens)
    width = side if side**2 == tokens else tokens
    rows, columns = sorted({token // width for token in block}), sorted({token % width for token in block})
    return rows[(len(rows) - 1) // 2] * width + columns[(len(columns) - 1) // 2]
