"""Pruning plans: the weightless graphs of a method at a budget, and their lookup in a bundle."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sinkprune.contract.budgets import UNPRUNED, Budget, Counts, Share
from sinkprune.contract.checks.fields import OPTIONAL, Count
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.families import parse_budget

MAX_TOP_K = 3840
"""The largest K of a TopK in TensorRT 10 (ITopKLayer, NvInfer.h). The export keeps pruning graphs within it."""

AVERAGING = frozenset({"downsample", "downsample-ttft", "visionzip", "visionzip+filter", "vscan"})
"""The methods whose sanitizer averages the tokens that it does not keep into tokens that it keeps.

All other methods drop such tokens. Outliers are apart: `Counts.sink` says whether a plan averages them. The methods
are known by name, because a bundle's plans do not say this.
"""

_OF_MACHINE = re.compile(r"(in|mean)-([0-9.]+)(?:ms)?")
"""Names of budgets that sinkprune-calibrate schedule writes."""


@dataclass(frozen=True)
class Plan:
    """The weightless graphs of one method at one budget, by their name under `graphs`."""

    sanitizer: str | None
    """The graph between `vision` and `projector`; None if all visual tokens go to the LLM."""
    select_after: dict[str, str]
    """The graph after each pruning layer, by the layer's 0-based number, ascending."""
    positions: Literal["keep", "compact"]
    """Whether survivors of a stage keep their position ids or are renumbered."""
    counts: Counts | None
    """The token counts of one group; None if images differ in their number of visual tokens."""
    shares: Budget | None
    """The shares that the graphs keep, if images differ in their number of visual tokens. They are the budget's own,
    or those by which another method meets the budget's mean. None if there are `counts`."""
    heads: dict[str, tuple[Count, ...]] | None = field(default=None, metadata=OPTIONAL)
    """The attention heads that count in the select after each layer, by the layer's 0-based number; None for all."""

    def keeps(self, tokens: int, groups: int) -> tuple[Counts, int]:
        """Return what the graphs keep of a picture of `groups` groups of `tokens` visual tokens each.

        The result is the counts and their number of groups: a clip's frames may form one group.
        """
        if self.shares is not None:
            if self.shares.frames == "together":
                tokens, groups = tokens * groups, 1
            return self.shares.resolve(tokens, groups), groups
        if self.counts is None:
            raise ValueError("a plan has counts or shares")
        return self.counts.of_groups(groups), groups

    @property
    def picture_share(self) -> Share | None:
        """The share of its tokens that each picture is made smaller to, before the tower; None keeps its size.

        A plan without graphs has one, its `shares.reserve`: no token of the smaller picture is dropped.
        """
        return self.shares.reserve if self.shares is not None and not self.graphs else None

    @property
    def graphs(self) -> list[str]:
        """Return the names of all graphs, in the order they run."""
        return [*([] if self.sanitizer is None else [self.sanitizer]), *self.select_after.values()]

    @property
    def cuts(self) -> list[int]:
        """Return the 0-based layers after which the plan prunes."""
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
            f"this bundle holds no method '{method}'; it holds: {', '.join(plans)}. Give one of "
            "these; others must be exported first, with sinkprune-export --methods."
        )
    if budget == UNPRUNED:
        return None
    if budget in budgets and budget not in plans[method]:
        held = ", ".join(plans[method])
        if not _is_exported(family, budget):
            others = ", ".join(name for name, own in plans.items() if budget in own)
            raise BudgetError(
                f"method '{method}' has no budget '{budget}', which was added for: {others}. '{method}' has: {held}."
            )
        raise BudgetError(
            f"method '{method}' cannot run on as few visual tokens as budget '{budget}' asks for, on this model; "
            f"it can at: {held}."
        )
    if budget not in plans[method]:
        raise BudgetError(
            f"this bundle holds no budget '{budget}' for method '{method}'; it holds: "
            f"{', '.join([UNPRUNED, *plans[method]])}. {_remedy(family, budget)}"
        )
    return plans[method][budget]


def _remedy(family: str, budget: str) -> str:
    """Return the sentence about how to add a `budget` to a bundle of the `family`."""
    of_machine = _OF_MACHINE.fullmatch(budget)
    if of_machine:
        option = {"in": "--target-ms", "mean": "--budget-tokens"}[of_machine[1]]
        return f"Find it on this machine and add it: sinkprune-calibrate schedule BUNDLE {option} {of_machine[2]}"
    if not _is_exported(family, budget):
        return (
            f"It is no budget of family '{family}' either. Choose one of these. For a model that answers, "
            "sinkprune-calibrate schedule finds one for this machine."
        )
    return "Others must be exported first, with sinkprune-export --budgets."


def _is_exported(family: str, budget: str) -> bool:
    """Return whether the export makes budgets of this name, for any bundle of the `family`."""
    try:
        parse_budget(family, budget)
    except BudgetError:
        return False
    return True
