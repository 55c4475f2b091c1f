"""The model families, one row each, and the names of their budgets.

A row names two classes, which are imported with the first checkpoint or bundle of the family (docs/new-family.md).
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
from sinkprune.contract.registry import Registry


@dataclass(frozen=True)
class FamilyRow:
    """The facts of a family that are known without importing its modules."""

    model_type: str
    """The `model_type` of a checkpoint's config.json."""
    architecture: str
    """The class in transformers, as `architectures` of config.json names it, or in LeRobot."""
    export: str
    """The class that reads its checkpoints and writes its graphs, as in `package.module:Class`: a
    `sinkprune.export.families.Family`."""
    runtime: str
    """The class that lays out its pictures: a `sinkprune.runtime.families.Family`."""
    budgets: Mapping[str, Budget]
    """The family's budgets by name (method.md section 3)."""


def _ours(model_type: str, architecture: str, classes: str, budgets: Mapping[str, Budget]) -> FamilyRow:
    export, runtime = (f"sinkprune.{side}.families.{classes}" for side in ("export", "runtime"))
    return FamilyRow(model_type, architecture, export, runtime, budgets)


LLAVA = _ours("llava", "LlavaForConditionalGeneration", "llava:Llava", LLAVA_BUDGETS)
LLAVA_NEXT = _ours("llava_next", "LlavaNextForConditionalGeneration", "llava_next:LlavaNext", LLAVA_NEXT_BUDGETS)
QWEN2_5_VL = _ours("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl:Qwen25VL", QWEN_BUDGETS)
QWEN2_VL = _ours("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl:Qwen2VL", QWEN_BUDGETS)
QWEN3_VL = _ours("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl:Qwen3VL", QWEN_BUDGETS)
PI0 = _ours("pi0", "PI0ForConditionalGeneration", "pi0:Pi0", QWEN_BUDGETS)
PI05 = _ours("pi05", "PI05Policy", "pi05:Pi05", QWEN_BUDGETS)

FAMILIES = Registry[FamilyRow]("sinkprune.families")
"""Every family that an installed package registers, by its name in `bundle.json`."""


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
