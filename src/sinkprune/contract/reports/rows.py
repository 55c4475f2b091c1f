"""The rows of tables of methods and budgets. A smaller picture, the cheapest baseline, comes first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

from sinkprune.contract.budgets import UNPRUNED

BASELINES = ("downsample", "downsample-ttft")
"""The methods that give the model a smaller picture."""
Figures = TypeVar("Figures")


def in_order_of_rows(methods: Iterable[str]) -> list[str]:
    """Return methods in the order of a table's rows: `BASELINES` first."""
    return sorted(methods, key=lambda method: method not in BASELINES)


class Row(NamedTuple):
    """A row of a profile: a method at a budget."""

    method: str
    budget: str


def profile_rows(plans: Mapping[str, Collection[str]], method: str, budgets: Iterable[str]) -> list[Row]:
    """Return what a profile of `method` measures: the unpruned engines, the baselines, then the other budgets.

    `plans` has the budgets of each method that the bundle holds. A baseline is measured at those of `budgets` that it
    has, unless `method` is a baseline itself.
    """
    pruned = [budget for budget in dict.fromkeys(budgets) if budget != UNPRUNED]
    others = () if method in BASELINES else BASELINES
    baselines = [Row(other, budget) for other in others for budget in pruned if budget in plans.get(other, ())]
    return [Row(method, UNPRUNED), *baselines, *(Row(method, budget) for budget in pruned)]


def by_method(figures: Mapping[Row, Figures]) -> dict[str, dict[str, Figures]]:
    """Return the figures of rows by their method and budget."""
    found: dict[str, dict[str, Figures]] = {}
    for row, own in figures.items():
        found.setdefault(row.method, {})[row.budget] = own
    return found


def named_rows(budgets: Mapping[str, Figures], baselines: Mapping[str, Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of a profile by its rows, such as `none`, `downsample retain-64` and `retain-64`."""
    named = {f"{method} {budget}": own for method, each in baselines.items() for budget, own in each.items()}
    return {UNPRUNED: budgets[UNPRUNED], **named, **budgets}
