"""A plan's graphs as files of a bundle."""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.manifest import GraphSpec
from sinkprune.contract.plans import Plan
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs


def save_plan(
    root: Path, facts: PlanFacts, method: str, name: str, built: PlanGraphs
) -> tuple[Plan, dict[str, GraphSpec]]:
    """Write the graphs of `method` at the budget of that name below `root`; the plan, and its graphs' interfaces.

    `facts` are those that the graphs were built with.
    """
    folder = f"{method}/{name}"
    graphs = {
        f"{folder}/{graph.name}": graph.save(root, f"graphs/{folder}/{graph.name}.onnx")
        for graph in filter(None, [built.sanitizer, *built.select_after.values()])
    }
    sanitizer = f"{folder}/{built.sanitizer.name}" if built.sanitizer else None
    selects = {str(layer): f"{folder}/{graph.name}" for layer, graph in built.select_after.items()}
    counts = built.kept.resolve(facts.tokens) if isinstance(facts.tokens, int) else None
    return Plan(sanitizer, selects, built.kept.positions, counts, None if counts else built.kept), graphs
