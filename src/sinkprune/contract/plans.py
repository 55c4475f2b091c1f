"""Pruning plans: the weightless graphs of a method at a budget, and how they are found in a bundle."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from sinkprune.contract.budgets import UNPRUNED, Budget, Counts
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.families import parse_budget

MAX_TOP_K = 3840
"""The largest K of a TopK in TensorRT 10 (ITopKLayer, NvInfer.h). The export keeps pruning graphs within it."""

_OF_MACHINE = re.compile(r"(in|mean)-([0-9.]+)(?:ms)?")
"""Names that sinkprune-calibrate schedule gives to budgets."""


@dataclass(frozen=True)
class Plan:
    """The weightless graphs of one method at one budget, by their name under `graphs`."""

    sanitizer: str | None
    """The graph between `vision` and `projector`; None if every visual token goes to the LLM."""
    select_after: dict[str, str]
    """The graph behind each pruning layer, by the layer's 0-based number, ascending."""
    positions: Literal["keep", "compact"]
    """Whether survivors of a stage keep their position ids or are renumbered."""
    counts: Counts | None
    """The token counts its graphs realise on one group of this bundle's visual tokens; None where images differ in
    theirs."""
    shares: Budget | None
    """The shares its graphs take of what they are given, where images differ in their number of visual tokens: the
    budget's own, or those by which another method meets the budget's mean. None where `counts` says it."""

    def keeps(self, tokens: int, groups: int) -> tuple[Counts, int]:
        """What its graphs keep of a picture of `groups` groups of `tokens` visual tokens each.

        The counts, and of how many groups they are: a clip's frames may be sanitised as one.
        """
        if self.shares is not None:
            if self.shares.frames == "together":
                tokens, groups = tokens * groups, 1
            return self.shares.resolve(tokens, groups), groups
        if self.counts is None:
            raise ValueError("a plan has counts or shares")
        return self.counts.of_groups(groups), groups

    @property
    def graphs(self) -> list[str]:
        """The names of all its graphs, in the order they run."""
        return [*([] if self.sanitizer is None else [self.sanitizer]), *self.select_after.values()]

    @property
    def cuts(self) -> list[int]:
        """The 0-based layers that it prunes after."""
        return [int(layer) for layer in self.select_after]


def find_plan(
    plans: Mapping[str, Mapping[str, Plan]], budgets: Container[str], family: str, method: str, budget: str
) -> Plan | None:
    """Return the plan of `method` at `budget` among a bundle's `plans`, None for the unpruned engines.

    `budgets` are the names of all budgets of the bundle, and `family` is its family. Raises `BudgetError` with what
    the bundle holds.
    """
    if method not in plans:
        raise BudgetError(
            f"this bundle holds no method '{method}'; it holds: {', '.join(plans)}. "
            "Others must be exported first, with sinkprune-export --methods."
        )
    if budget == UNPRUNED:
        return None
    if budget in budgets and budget not in plans[method]:
        raise BudgetError(
            f"method '{method}' cannot run on as few visual tokens as budget '{budget}' asks for, on this model; "
            f"it can at: {', '.join(plans[method])}."
        )
    if budget not in plans[method]:
        raise BudgetError(
            f"this bundle holds no budget '{budget}' for method '{method}'; it holds: "
            f"{', '.join([UNPRUNED, *plans[method]])}. {_remedy(family, budget)}"
        )
    return plans[method][budget]


def _remedy(family: str, budget: str) -> str:
    """Return how a bundle of the `family` gets a `budget` that it does not hold."""
    of_machine = _OF_MACHINE.fullmatch(budget)
    if of_machine:
        option = {"in": "--target-ms", "mean": "--budget-tokens"}[of_machine[1]]
        return f"Find it on this machine and add it: sinkprune-calibrate schedule BUNDLE {option} {of_machine[2]}"
    try:
        parse_budget(family, budget)
    except BudgetError:
        return f"It is no budget of family '{family}' either."
    return "Others must be exported first, with sinkprune-export --budgets."
