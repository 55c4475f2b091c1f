"""The model families, one row each, by their name in `bundle.json`.

A row names a module in `sinkprune.export.families` and one in `sinkprune.runtime.families`. They are imported with
the first checkpoint or bundle of the family (docs/new-family.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sinkprune.contract.budgets import (
    FROM,
    LLAVA_BUDGETS,
    LLAVA_NEXT_BUDGETS,
    OPTIONS,
    QWEN_BUDGETS,
    Budget,
    with_option,
)
from sinkprune.contract.errors import BudgetError


@dataclass(frozen=True)
class FamilyRow:
    """The facts of a family that are known without importing its modules."""

    model_type: str
    """The `model_type` of a checkpoint's config.json."""
    architecture: str
    """The class in transformers, as `architectures` of config.json names it, or in LeRobot."""
    module: str
    """The name of the family's modules in `export/families/` and `runtime/families/`."""
    budgets: Mapping[str, Budget]
    """The family's budgets by name (method.md section 3)."""


FAMILIES: dict[str, FamilyRow] = {
    "llava": FamilyRow("llava", "LlavaForConditionalGeneration", "llava", LLAVA_BUDGETS),
    "llava-next": FamilyRow("llava_next", "LlavaNextForConditionalGeneration", "llava_next", LLAVA_NEXT_BUDGETS),
    "qwen2.5-vl": FamilyRow("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", QWEN_BUDGETS),
    "qwen2-vl": FamilyRow("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl", QWEN_BUDGETS),
    "qwen3-vl": FamilyRow("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl", QWEN_BUDGETS),
    "pi0": FamilyRow("pi0", "PI0ForConditionalGeneration", "pi0", QWEN_BUDGETS),
    "pi0.5": FamilyRow("pi05", "PI05Policy", "pi05", QWEN_BUDGETS),
}


def parse_budget(family: str, name: str) -> Budget:
    """Return the budget `name` of `family`. Raises `BudgetError` with the known names."""
    base, *options = name.split("+")
    rows = FAMILIES[family].budgets
    if base not in rows:
        inside = f" (in '{name}')" if options else ""
        raise BudgetError(
            f"unknown budget '{base}'{inside}; family '{family}' has: {', '.join(rows)}. "
            f"Options may follow, as in '{next(iter(rows))}+compact': {', '.join(OPTIONS)}, rho-N, from-BUDGET."
        )
    budget = rows[base]
    # First, so that the order of options changes nothing.
    for option in sorted(options, key=lambda option: not option.startswith(FROM)):
        try:
            budget = with_option(budget, option, rows)
        except BudgetError as error:
            raise BudgetError(f"budget '{name}': {error}") from error
    return budget
