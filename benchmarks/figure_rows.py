"""Rows of single methods, measured later than the other rows of their table.

A new method does not change the answers of the others, so one command measures its row alone. The unpruned model and
`sinkpruner` are measured with it. If their answers have changed, the whole table must be measured again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sinkprune.calibration.evaluation.replies import EvaluationReport
from sinkprune.calibration.plots import plot_evaluation
from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import UsageError

FIRST = "sinkpruner"
"""The method that all others are compared with."""
_SAME = ("threads", "task", "questions", "pictures", "precision")


def with_rows(
    kept: Mapping[str, Any], new: Mapping[str, Any], methods: Sequence[str], order: Sequence[str]
) -> dict[str, Any]:
    """Return the measurement `kept` with the rows `methods` of the measurement `new`. `order` is that of all rows.

    `later` of the result has the date, the machine and the unpruned figures of each such row. Raises `UsageError` if
    the two measurements have other questions, or other accuracies of the unpruned model or of `FIRST`.
    """
    old, found = kept["report"], new["report"]
    changed = [name for name in _SAME if old[name] != found[name]]
    for what, own, other in (("none", old["none"], found["none"]), *_shared(old, found)):
        changed += [what] if own["accuracy"] != other["accuracy"] else []
    if changed:
        raise UsageError(
            f"the kept measurement and this one differ in {', '.join(changed)}. Measure the whole part again."
        )
    rows = old["methods"] | {name: found["methods"][name] for name in methods}
    run = {name: found[name] for name in ("machine", "threads", "versions")}
    run["none"] = {"ttft_ms": found["none"]["ttft_ms"]}
    when = {"date": new["date"], "instructions": new["instructions"], "report": run}
    return {
        **kept,
        "commands": new["commands"],
        "later": kept.get("later", {}) | dict.fromkeys(methods, when),
        "report": old | {"methods": {name: rows[name] for name in order if name in rows}},
    }


def plot_of(report: Mapping[str, Any], suffix: str) -> bytes:
    """Return the picture that `sinkprune-evaluate --plot` draws of its report, as a file with `suffix`."""
    # No reader of JSON makes named tuples, and the picture shows none.
    # The command adds `interrupted` to the report.
    fields = {name: value for name, value in report.items() if name != "interrupted"}
    return plot_evaluation(from_json(EvaluationReport, {**fields, "unreachable": []}), suffix)


def _shared(old: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return each budget of the first method in both reports, with its name."""
    first, again = old["methods"][FIRST], found["methods"][FIRST]
    return [(f"{FIRST} at {budget}", own, again[budget]) for budget, own in first.items()]
