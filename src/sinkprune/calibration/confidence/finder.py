"""Exhaustive search for the steps of budget `auto` that take the least mean time at an accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from sinkprune.contract.precision import Array

MOST_STEPS = 3
"""The most budgets that one request tries."""
_CANDIDATES = 20
"""The most thresholds that are compared for a budget."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of an answer at one budget, medians over questions."""

    ttft_ms: float
    """Of a whole request, to the first token."""
    tower_ms: float
    """The part of it that later steps do not need: preparing the picture, and the vision tower."""
    resumed_ms: float | None
    """Of a step to the first token after a step at another budget of its ladder; None for a budget without ladder."""
    passes_ms: float
    """From the first token to the whole answer."""
    ladder: int | None = None
    """The number of the budget's ladder."""

    def first_token(self, earlier: Sequence[StepTimes]) -> float:
        """Return the milliseconds to the first token in a request that tried `earlier` budgets."""
        if not earlier:
            return self.ttft_ms
        if self.resumed_ms is not None and any(one.ladder == self.ladder for one in earlier):
            return self.resumed_ms
        return self.ttft_ms - self.tower_ms


@dataclass(frozen=True)
class AskedQuestions:
    """Q questions that were answered at each of B budgets, the smallest first and the unpruned model last."""

    right: Array
    """[Q,B] bool: whether the answer was right."""
    confidence: Array
    """[Q,B] float: the probability of the likeliest answer."""
    pictures: Array
    """[Q] int: the picture's number of each question."""
    times: tuple[StepTimes, ...]

    def part(self, chosen: Array) -> AskedQuestions:
        """Return the questions of a mask `chosen` [Q]."""
        right, confidence = self.right[chosen], self.confidence[chosen]
        return replace(self, right=right, confidence=confidence, pictures=self.pictures[chosen])


class Steps(NamedTuple):
    """The budgets that a request tries, by their numbers, and the thresholds of all but the last."""

    budgets: tuple[int, ...]
    least: tuple[float, ...]


class Outcome(NamedTuple):
    """The answers of a request with certain steps to Q questions."""

    right: Array
    """[Q] bool."""
    last: Array
    """[Q] int: the number of the step whose answer stands."""
    mean_ms: float
    """The mean TTFT."""


def outcome(asked: AskedQuestions, steps: Steps) -> Outcome:
    """Return what a request with these steps answers."""
    confidence = asked.confidence[:, steps.budgets[:-1]]
    stands = np.concatenate([confidence >= np.array(steps.least), np.ones((len(confidence), 1), bool)], axis=1)
    last = stands.argmax(axis=1)
    right = asked.right[np.arange(len(last)), np.array(steps.budgets)[last]]
    return Outcome(right, last, float(_ms_by_last(asked, steps.budgets)[last].mean()))


def fastest(asked: AskedQuestions, least_right: Sequence[int]) -> list[Steps]:
    """Return, for each number of right answers, the steps with the least mean TTFT that give as many.

    Of equal times, more right answers are better, and then fewer steps. Where no steps give as many, those with most
    right answers are returned.
    """
    best: list[tuple[tuple[int, float, int, int], Steps] | None] = [None] * len(least_right)
    for budgets, thresholds, rights, times in _all_steps(asked):
        for number, needed in enumerate(least_right):
            # Steps with too few right answers come last, those with most of them first.
            missing = np.maximum(needed - rights, 0)
            place = int(np.lexsort((-rights, times, missing))[0])
            rank = (int(missing[place]), round(float(times[place]), 9), -int(rights[place]), len(budgets))
            known = best[number]
            if known is None or rank < known[0]:
                best[number] = rank, Steps(budgets, tuple(float(value) for value in thresholds[place]))
    return [found[1] for found in best if found is not None]


def cross_validated(asked: AskedQuestions, shares: Sequence[float], folds: int) -> list[Outcome]:
    """Return the outcome of `fastest` for each share of the unpruned accuracy, on questions that it did not see.

    The pictures are divided into `folds`; with one picture the questions are. Each part's thresholds come from the
    other parts.
    """
    pictures = asked.pictures if len(set(asked.pictures.tolist())) > 1 else np.arange(len(asked.pictures))
    names = np.unique(pictures)
    fold_of = np.random.default_rng(0).permutation(len(names)) % min(folds, len(names))
    fold = fold_of[np.searchsorted(names, pictures)]
    count = len(fold)
    right, last = np.zeros((len(shares), count), bool), np.zeros((len(shares), count), np.int64)
    sums = np.zeros(len(shares))
    for number in np.unique(fold):
        held = fold == number
        # With one question nothing else is there to learn from.
        known = asked.part(~held) if (~held).any() else asked
        for row, steps in enumerate(fastest(known, least_right(known, shares))):
            found = outcome(asked.part(held), steps)
            right[row, held], last[row, held] = found.right, found.last
            sums[row] += found.mean_ms * held.sum()
    return [Outcome(right[row], last[row], float(sums[row] / count)) for row in range(len(shares))]


def least_right(asked: AskedQuestions, shares: Sequence[float]) -> list[int]:
    """Return how many right answers are each share of those of the unpruned model."""
    unpruned = int(asked.right[:, -1].sum())
    # 0.9 of 10 is 9, whatever the last bit of the product.
    return [int(np.ceil(share * unpruned - 1e-9)) for share in shares]


def _all_steps(asked: AskedQuestions) -> Iterator[tuple[tuple[int, ...], Array, Array, Array]]:
    """Yield for each choice of budgets its n thresholds [n,steps-1], right answers [n] and mean TTFT [n]."""
    count = len(asked.right)
    thresholds = [_candidates(column) for column in asked.confidence.T]
    stands = [asked.confidence[:, number] >= values[:, None] for number, values in enumerate(thresholds)]
    for number in range(1, MOST_STEPS + 1):
        for budgets in combinations(range(asked.right.shape[1]), number):
            ms = _ms_by_last(asked, budgets)
            # Of questions that reach the last step: how many there are, and right answers.
            left, rights, times = np.ones((1, count), np.int64), np.zeros((1, 1)), np.zeros((1, 1))
            chosen = np.zeros((1, 0))
            for step, budget in enumerate(budgets[:-1]):
                here, right = stands[budget].astype(np.int64), asked.right[:, budget].astype(np.int64)
                rights = rights + (left * right) @ here.T
                times = times + ms[step] * (left @ here.T)
                left = (left[:, None, :] * (1 - here)[None]).reshape(-1, count)
                rights, times = rights.reshape(-1, 1), times.reshape(-1, 1)
                values = thresholds[budget]
                chosen = np.column_stack([np.repeat(chosen, len(values), axis=0), np.tile(values, len(chosen))])
            rights = rights[:, 0] + left @ asked.right[:, budgets[-1]].astype(np.int64)
            times = times[:, 0] + ms[-1] * left.sum(axis=1)
            yield budgets, chosen, rights.astype(np.int64), times / count


def _candidates(confidence: Array) -> Array:
    """Return the thresholds to compare: confidences that occur, evenly among the questions."""
    shares = np.linspace(0, 1, _CANDIDATES)
    return np.unique(np.quantile(confidence, shares, method="higher"))


def _ms_by_last(asked: AskedQuestions, budgets: Sequence[int]) -> Array:
    """Return [steps]: the TTFT of a request whose answer stands at each step."""
    times, spent, total = [asked.times[budget] for budget in budgets], 0.0, []
    for step, own in enumerate(times):
        first = spent + own.first_token(times[:step])
        total.append(first)
        spent = first + own.passes_ms
    return np.array(total)
