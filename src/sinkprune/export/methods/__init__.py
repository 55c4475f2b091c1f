"""Pruning methods. A method turns a budget into weightless graphs, a `PlanGraphs`.

`METHODS` of a module are its methods by name. A method before the LLM is a function and a row in `before_llm`; other
methods have modules of their own. The decoder is cut after each layer where a plan selects.
"""

from __future__ import annotations

import importlib
import pkgutil

from sinkprune.contract.errors import BudgetError
from sinkprune.export.pruning.plan import Method


def load_method(name: str) -> Method:
    """Return the method `name`; raises `BudgetError` with the known names."""
    methods = all_methods()
    if name not in methods:
        raise BudgetError(f"unknown method '{name}'; known methods: {', '.join(sorted(methods))}.")
    return methods[name]


def all_methods() -> dict[str, Method]:
    """Return every method of this package's modules, by name."""
    methods: dict[str, Method] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        methods |= importlib.import_module(module.name).METHODS
    return methods
