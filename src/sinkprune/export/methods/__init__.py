"""Pruning methods. A method turns a budget into weightless graphs, a `PlanGraphs`.

The decoder is cut after each layer where a plan selects. A method is a `Method`, and a line in pyproject.toml;
a method that chooses tokens before the LLM is made of a rule by `before_llm.build_before`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkprune.contract.checks import unknown_name
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.registry import Registry

if TYPE_CHECKING:
    from sinkprune.export.pruning.plan import Method

METHODS: Registry[Method] = Registry("sinkprune.methods")
"""Every method that an installed package registers, by name."""


def load_method(name: str) -> Method:
    """Return the method `name`; raises `BudgetError` with the known names."""
    if name not in METHODS:
        raise BudgetError(
            unknown_name(f"unknown method '{name}'", name, METHODS, "Known methods")
            + " A new entry point is found after its package is installed again."
        )
    return METHODS[name]
