"""What to export: images, budgets, methods and the layers where graphs are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sinkprune.contract.budgets import FAMILIES, OTHER_TOWERS, UNPRUNED, Budget, Plan, parse_budget
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.manifest import GraphSpec
from sinkprune.export.methods import load_method
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, UnreachableBudget


@dataclass(frozen=True)
class Unreachable:
    """A plan that was left out, because the method cannot keep as few visual tokens as the budget."""

    method: str
    budget: str
    why: str


def parse_budgets(family: str, names: Sequence[str] | None) -> dict[str, Budget]:
    """Return the budgets `names`, or all of the family for None; raises `BudgetError`."""
    names = tuple(FAMILIES[family].budgets) if names is None else names
    if UNPRUNED in names:
        raise BudgetError(f"'{UNPRUNED}' needs no export: every bundle runs unpruned. Leave it out of --budgets.")
    return {name: parse_budget(family, name) for name in names}


def plan_graphs(
    facts: PlanFacts, methods: Sequence[str], budgets: Mapping[str, Budget], left_out: Callable[[Unreachable], None]
) -> dict[str, dict[str, PlanGraphs]]:
    """Return the plans by method and budget, at least one for each method; raises `BudgetError`."""
    builders = {name: load_method(name) for name in methods}
    if not facts.joined and any(budget.frames == "apart" for budget in budgets.values()):
        raise BudgetError(
            "option 'per-frame' is for models that sanitise several groups of a clip's frames as one. Leave it out, "
            "or give such a model a larger --max-frames."
        )
    if facts.language_model.rope_sections and any(budget.positions == "compact" for budget in budgets.values()):
        raise BudgetError(
            "option 'compact' renumbers rows in line, and the positions of this family have several axes. "
            "Leave the option out."
        )
    shares = {name: _after_tower(facts, name, budget) for name, budget in budgets.items()}
    planned: dict[str, dict[str, PlanGraphs]] = {method: {} for method in methods}
    unreachable: list[Unreachable] = []
    for (method, build), (name, budget) in product(builders.items(), budgets.items()):
        try:
            planned[method][name] = build(facts.after_tower(budget), shares[name])
        except UnreachableBudget as error:
            unreachable.append(Unreachable(method, name, str(error)))
            continue
        _check_first_cut(facts, method, planned[method][name])
    for missed in unreachable:
        if not planned[missed.method]:
            raise BudgetError(
                f"method '{missed.method}' reaches none of the budgets {', '.join(budgets)}. At '{missed.budget}': "
                f"{missed.why}. Choose larger budgets, or leave the method out of --methods."
            )
    for missed in unreachable:
        left_out(missed)
    return planned


def _after_tower(facts: PlanFacts, name: str, budget: Budget) -> Budget:
    try:
        return facts.shares_after_tower(budget)
    except BudgetError as error:
        raise BudgetError(f"budget '{name}': {error}") from error


def _check_first_cut(facts: PlanFacts, method: str, plan: PlanGraphs) -> None:
    """Raise `BudgetError` for a plan that drops rows before the model has added all DeepStack features."""
    first, last = min(plan.select_after, default=facts.language_model.num_layers), facts.deepstack - 1
    if first < last:
        raise BudgetError(
            f"method '{method}' drops tokens after layer {first} of this decoder, which has "
            f"{facts.language_model.num_layers}, and the model adds vision features to its visual rows after layers "
            f"0 to {last} (DeepStack), all within the first segment. No stage may come before layer {last}: leave "
            "the method out of --methods, or export a deeper decoder."
        )


def save_plan(
    root: Path, facts: PlanFacts, method: str, name: str, built: PlanGraphs
) -> tuple[Plan, dict[str, GraphSpec]]:
    """Write the graphs of `method` at the budget `name` below `root`, and return the plan and the graphs' interfaces.

    The graphs were built with `facts`.
    """
    folder = f"{method}/{name}"
    graphs = {
        f"{folder}/{graph.name}": graph.save(root, f"graphs/{folder}/{graph.name}.onnx") for graph in built.graphs
    }
    sanitizer = f"{folder}/{built.sanitizer.name}" if built.sanitizer else None
    selects = {str(layer): f"{folder}/{graph.name}" for layer, graph in built.select_after.items()}
    facts, tower = facts.after_tower(built.kept), OTHER_TOWERS[built.kept.tower] if built.kept.tower else None
    counts = built.kept.resolve(facts.tokens) if isinstance(facts.tokens, int) else None
    shares = None if counts else built.kept
    own = built.kept
    return Plan(sanitizer, selects, own.positions, counts, shares, tower, own.queries), graphs
