"""Equal mean visual tokens per layer: the tokens that a method keeps so that a budget means the same for all.

A budget is a schedule of SinkPruner. Its mean counts, for each layer of the decoder, the visual tokens that the layer
ran on (method.md section 5, "input counting"). Every other method must meet this mean (docs/methods.md). Means are
exact fractions, so that no count depends on a machine's rounding. Counts here are of the model's nominal tokens
(`PlanFacts.nominal_tokens`): those of each image, or ten thousand if images differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from sinkprune.contract.budgets import Budget, Counts, Share, prune_layers, round_half_up
from sinkprune.contract.schedule import PictureSchedule
from sinkprune.export.pruning.plan import PlanFacts, UnreachableBudget

# Schedules are searched in steps of a millionth, finer than one token of any image.
_STEPS = 1_000_000


def mean_tokens(counts: Counts, cuts: Sequence[int], num_layers: int) -> Fraction:
    """Return the mean visual tokens per layer of `counts`, with stages after the layers `cuts`."""
    return PictureSchedule.of(counts, 1, cuts).mean(num_layers)


def budget_mean(facts: PlanFacts, budget: Budget) -> Fraction:
    """Return the mean of `budget` under SinkPruner on this model."""
    layers = facts.language_model.num_layers
    return mean_tokens(budget.resolve(facts.nominal_tokens), prune_layers(layers), layers)


def shares_of(facts: PlanFacts, budget: Budget, counts: Counts) -> Budget:
    """Return `budget` with the shares that `counts` are of the model's nominal tokens."""
    n = facts.nominal_tokens
    return replace(
        budget,
        reserve=Share(counts.reserve, n),
        diverse=Share(counts.diverse, n),
        stages=tuple(Share(stage, n) for stage in counts.stages),
    )


def kept_before(facts: PlanFacts, budget: Budget, *, reserve: int = 0, diverse: int = 0) -> Budget:
    """Return the shares of a method that keeps these nominal tokens before the LLM, and drops none in it."""
    before = replace(budget, sanitizer=True, remove_outliers=False)
    return shares_of(facts, before, Counts(outliers=0, sink=0, reserve=reserve, diverse=diverse, stages=()))


def tokens_into_llm(facts: PlanFacts, budget: Budget) -> int:
    """Return the nominal tokens of each group that a method keeps before the LLM: the mean, rounded half up."""
    return min(facts.nominal_tokens, max(1, round_half_up(budget_mean(facts, budget))))


def scaled_stages(facts: PlanFacts, budget: Budget, cuts: Sequence[int], stages: Sequence[int]) -> Budget:
    """Return all N tokens into the LLM, then `stages` after the layers `cuts`, scaled alike to meet the mean.

    A stage keeps at least 1 token. Raises `UnreachableBudget`.
    """

    def scaled(step: int) -> Counts:
        kept = tuple(max(1, round_half_up(Fraction(stage * step, _STEPS))) for stage in stages)
        return Counts(outliers=0, sink=0, reserve=facts.nominal_tokens, diverse=0, stages=kept)

    return shares_of(facts, replace(budget, sanitizer=False), _nearest(facts, budget, cuts, scaled))


def half_and_eighth(facts: PlanFacts, budget: Budget, cuts: Sequence[int]) -> Budget:
    """Return the tokens into the LLM, half of them after the first of `cuts`, and an eighth after the second."""

    def counts(step: int) -> Counts:
        before, half, eighth = (
            max(1, round_half_up(Fraction(facts.nominal_tokens * step, part * _STEPS))) for part in (1, 2, 8)
        )
        return Counts(outliers=0, sink=0, reserve=0, diverse=before, stages=(half, eighth))

    return shares_of(facts, budget, _nearest(facts, budget, cuts, counts))


def without_stages(facts: PlanFacts, budget: Budget) -> Budget:
    """Return `budget` without stages: a sanitizer keeps its mean, salient and diverse tokens in its proportion."""
    sanitizing = replace(budget, sanitizer=True)
    counts = sanitizing.resolve(facts.nominal_tokens)
    chosen = min(tokens_into_llm(facts, budget) - counts.sink, facts.nominal_tokens - counts.outliers)
    diverse = chosen * counts.diverse // max(1, counts.reserve + counts.diverse)
    return shares_of(facts, sanitizing, replace(counts, reserve=chosen - diverse, diverse=diverse, stages=()))


def _nearest(facts: PlanFacts, budget: Budget, cuts: Sequence[int], counts: Callable[[int], Counts]) -> Counts:
    """Return the counts whose mean is nearest to the budget's; they grow with their argument, from 0 to `_STEPS`.

    Raises `UnreachableBudget` if even the smallest mean rounds to a larger count than the budget's.
    """
    layers, wanted = facts.language_model.num_layers, budget_mean(facts, budget)

    def mean(step: int) -> Fraction:
        return mean_tokens(counts(step), cuts, layers)

    if mean(0) > wanted + Fraction(1, 2):
        everything = f"all {facts.tokens}" if isinstance(facts.tokens, int) else "all"
        raise UnreachableBudget(
            f"layers 0 to {cuts[0]} run on {everything} visual tokens, so that the mean over {layers} layers is "
            f"{_format_mean(facts, mean(0))} at least; the budget's is {_format_mean(facts, wanted)}"
        )
    above = min(_STEPS, bisect_left(range(_STEPS + 1), wanted, key=mean))
    return counts(min(max(0, above - 1), above, key=lambda step: abs(mean(step) - wanted)))


def _format_mean(facts: PlanFacts, mean: Fraction) -> str:
    """Return a mean as tokens, or as per cent of the nominal tokens if images differ."""
    if isinstance(facts.tokens, int):
        return f"{float(mean):.1f}"
    return f"{float(100 * mean / facts.nominal_tokens):.1f} %"
