"""Pruning methods: one module each. A method turns a budget into weightless graphs, a `PlanGraphs`.

A module gives `build(facts, budget)`, and `layers(num_layers)`, the decoder layers after which it selects. To add
a method, add its module and its name below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

from sinkprune.bundle import LanguageModel
from sinkprune.errors import BudgetError
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


@dataclass(frozen=True)
class PlanGraphs:
    """The graphs of one method at one budget."""

    sanitizer: Graph | None
    select_after: dict[int, Graph] = field(default_factory=dict)


def load_method(name: str) -> ModuleType:
    """The module of the method `name`; raises `BudgetError` with the known names."""
    from sinkprune.export.methods import sinkpruner

    methods = {"sinkpruner": sinkpruner}
    if name not in methods:
        raise BudgetError(f"unknown method '{name}'; known methods: {', '.join(methods)}.")
    return methods[name]
