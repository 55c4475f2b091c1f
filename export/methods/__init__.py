"""Pruning methods: one module each. A method turns a budget into weightless graphs, a `PlanGraphs`.

A module gives `METHODS`, its methods by name. To add a method, add its module: nothing else knows the names. The
decoder is cut wherever a plan selects.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field

from sinkprune.budgets import Budget, Counts
from sinkprune.bundle import LanguageModel
from sinkprune.errors import BudgetError
from sinkprune.export.dialects import Dialect
from sinkprune.export.graph import Graph
from sinkprune.export.precision import Precision


@dataclass(frozen=True)
class PlanFacts:
    """What a method may know of the model it prunes."""

    language_model: LanguageModel
    visual_tokens: int
    """N of each group."""
    visual_width: int
    """D, the width of `tokens`."""
    precision: Precision
    dialect: Dialect


@dataclass(frozen=True)
class PlanGraphs:
    """The graphs of one method at one budget."""

    counts: Counts
    """What the graphs keep of the model's visual tokens."""
    sanitizer: Graph | None = None
    """The graph before the LLM, for methods that drop tokens there."""
    select_after: dict[int, Graph] = field(default_factory=dict)
    """The graph behind each decoder layer (0-based) that the method drops tokens after."""


Method = Callable[[PlanFacts, Budget], PlanGraphs]
"""Builds the plan of a budget. Raises `UnreachableMean` where the method cannot keep as few tokens as the budget
asks for, and `BudgetError` where the model is too shallow for it."""


def load_method(name: str) -> Method:
    """The method `name`; raises `BudgetError` with the known names."""
    methods = all_methods()
    if name not in methods:
        raise BudgetError(f"unknown method '{name}'; known methods: {', '.join(sorted(methods))}.")
    return methods[name]


def all_methods() -> dict[str, Method]:
    """Every method of this package's modules, by name."""
    methods: dict[str, Method] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        methods |= importlib.import_module(module.name).METHODS
    return methods
