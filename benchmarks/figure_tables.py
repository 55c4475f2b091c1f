"""The tables of `figures.py`, in Markdown, from the JSON that its commands write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sinkprune.contract.checks import counted
from sinkprune.contract.report import in_order_of_rows

Figures = Mapping[str, Any]
"""What a part kept: `date`, `instructions`, `commands`, and `report`, the JSON that the last command wrote."""


def _where(figures: Figures) -> str:
    """Return the date, the machine and the libraries of a measurement, in words."""
    report, names = figures["report"], figures["instructions"].split()
    widest = next((text for name, text in _WIDEST.items() if name in names), "no AVX")
    threads = counted(report["threads"], "thread")
    found = {name: version for name, version in report["versions"].items() if name in _LIBRARIES}
    # OpenVINO's own version goes on with its build.
    libraries = ", ".join(f"{name} {version.partition('-')[0]}" for name, version in found.items())
    return f"{figures['date']}, {threads} of a shared {report['machine']} ({widest}), {libraries}"


_WIDEST = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimddp": "NEON",
}
_LIBRARIES = ("onnxruntime", "openvino")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _reduction(budget: Mapping[str, Any]) -> str:
    """Return the visual tokens of the picture, into the LLM and of the last layer."""
    return f"{budget['visual_tokens']}, {budget['kept_after_sanitizer']}, {budget['tokens_per_layer'][-1]}"


def savings_short(figures: Figures) -> str:
    """Return what pruning saves and what it costs, for the README. `methods`: that part, if kept."""
    report, methods = figures["report"], figures.get("methods")
    head = ["budget", "visual tokens: picture, into the LLM, last layer"]
    right = {"none": methods["report"]["none"], **methods["report"]["methods"]["sinkpruner"]} if methods else {}
    asked = methods["report"]["questions"] if methods else 0
    rows = [
        [
            f"`{name}`",
            _reduction(budget),
            f"{budget['ms']['ttft']['median']:.0f}",
            f"{budget['speedup']['ttft']:.2f}x",
            f"{100 * right[name]['accuracy']:.1f} %" if name in right else "-",
        ]
        for name, budget in report["budgets"].items()
    ]
    return (
        f"Tokens and times: `{report['model']}` (CLIP-L/336 and a 1.1 B Llama, random weights) in "
        f"{report['weights']['decoder']} on `{report['backend']}`;\n"
        f"medians of {report['repeat']} rounds; {_where(figures)}.\n"
        + (f"Accuracy: the pocket model in fp32, {asked} questions about drawn scenes.\n\n" if asked else "\n")
        + _table([*head, "TTFT ms", "speed-up", "accuracy (pocket model)"], rows)
    )


def savings_full(figures: Figures) -> str:
    """Return what pruning saves, with the parts of the time and their spread."""
    report = figures["report"]
    head = ["budget", "TTFT ms", "prefill ms", "selection ms", "a token ms", "KV cache MB", "prefill", "ideal"]
    rows = [
        [
            f"`{name}`",
            _spread(budget["ms"]["ttft"]),
            _spread(budget["ms"]["prefill"]),
            f"{budget['ms']['select']['median']:.1f}",
            f"{budget['ms']['per_token']['median']:.1f}",
            f"{budget['kv_bytes'] / 1e6:.1f}",
            f"{budget['speedup']['prefill']:.2f}x",
            f"{budget['flops_speedup']['prefill']:.2f}x",
            f"{budget['efficiency']['prefill']:.2f}",
            f"{budget['speedup']['ttft']:.2f}x",
        ]
        for name, budget in report["budgets"].items()
    ]
    commands = "\n".join(["```", *figures["commands"], "```"])
    table = _table([*head, "achieved", "TTFT"], rows)
    return (
        f"Measured on {_where(figures)}:\n\n{commands}\n\n`{report['model']}` in {report['weights']['decoder']} on "
        f"`{report['backend']}`, medians (p95) of {report['repeat']} rounds:\n\n{table}"
    )


def _spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.0f} ({spread['p95']:.0f})"


def _methods(figures: Figures) -> dict[str, Any]:
    """Return the results of each method, in the order of rows."""
    found = figures["report"]["methods"]
    return {name: found[name] for name in in_order_of_rows(found)}


def methods_full(figures: Figures) -> str:
    """Return the accuracy of every method at every budget, with half its 95 % interval and the share kept."""
    report = figures["report"]
    budgets = list(report["methods"]["sinkpruner"])
    tokens = [report["methods"]["sinkpruner"][name]["mean_visual_tokens"] for name in budgets]
    unpruned = report["none"]["mean_visual_tokens"]
    rows = [[f"mean visual tokens a layer, of {unpruned:.0f}", *(f"{each:.0f}" for each in tokens)]]
    rows += [
        [f"`{method}`", *(_accuracy(found[name]) if name in found else "-" for name in budgets)]
        for method, found in _methods(figures).items()
    ]
    where = "; ".join([_where(figures), *(f"{names} on {_where(run)}" for names, run in _later(figures))])
    return f"Measured on {where}:\n\n{_table(['method', *(f'`{name}`' for name in budgets)], rows)}"


def _later(figures: Figures) -> list[tuple[str, Figures]]:
    """Return the names of the rows of each later run, and that run without its rows."""
    runs: list[tuple[list[str], Figures]] = []
    for method, run in figures.get("later", {}).items():
        names = next((names for names, other in runs if other == run), None)
        if names is None:
            runs.append((names := [], run))
        names.append(f"`{method}`")
    return [(", ".join(names), run) for names, run in runs]


def versus_full(figures: Figures) -> str:
    """Return how many points each method has more than `sinkpruner`, with the interval paired by picture."""
    methods = _methods(figures)
    budgets = list(methods["sinkpruner"])
    rows = [
        [f"`{method}`", *(_difference(found[name]["versus_first"]) if name in found else "-" for name in budgets)]
        for method, found in methods.items()
        if method != "sinkpruner"
    ]
    return _table(["method", *(f"`{name}`" for name in budgets)], rows)


def paired(figures: Figures) -> str:
    """Return accuracies with the points more than `sinkpruner`."""
    report, methods = figures["report"], _methods(figures)
    budgets = list(methods["sinkpruner"])
    tokens = [f"{methods['sinkpruner'][name]['mean_visual_tokens']:.0f}" for name in budgets]
    unpruned = report["none"]["mean_visual_tokens"]
    rows = [[f"mean visual tokens a layer, of {unpruned:.0f}", *(cell for own in tokens for cell in (own, ""))]]
    for method, found in methods.items():
        own = [found[name] for name in budgets]
        cells = [cell for each in own for cell in (_interval(each), _versus(each["versus_first"]))]
        rows.append([f"`{method}`", *cells])
    heading = ["method", *(cell for name in budgets for cell in (f"`{name}`", "difference"))]
    none = _interval(report["none"])
    return (
        f"{report['questions']} questions about {report['pictures']} pictures, {report['precision']}, "
        f"`{report['backend']}`. Measured on {_where(figures)}. Unpruned: {none}\n\n{_table(heading, rows)}"
    )


def _interval(found: Mapping[str, Any]) -> str:
    low, high = found["ci95"]
    return f"{100 * found['accuracy']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _versus(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else _difference(found)


def ttft_full(figures: Figures) -> str:
    """Return the median TTFT of every method at every budget, and how many times as fast as unpruned it is."""
    report, later = figures["report"], figures.get("later", {})
    unpruned, budgets = report["none"]["ttft_ms"]["median"], list(report["methods"]["sinkpruner"])

    def cell(method: str, found: Mapping[str, Any]) -> str:
        base = later[method]["report"]["none"]["ttft_ms"]["median"] if method in later else unpruned
        median = found["ttft_ms"]["median"]
        return f"{median:.1f} ({base / median:.2f}x)"

    rows = [
        [f"`{method}`", *(cell(method, found[name]) if name in found else "-" for name in budgets)]
        for method, found in _methods(figures).items()
    ]
    table = _table([f"method; `none` {unpruned:.1f} ms", *(f"`{name}`" for name in budgets)], rows)
    runs = [
        f"{names}: `none` {run['report']['none']['ttft_ms']['median']:.1f} ms, {run['report']['machine']}."
        for names, run in _later(figures)
    ]
    return "\n\n".join([table, *runs])


def kinds(figures: Figures, columns: Sequence[tuple[str, str]]) -> str:
    """Return the accuracy by kind of question, unpruned and of each method and budget in `columns`."""
    report = figures["report"]
    shown = [report["none"], *(report["methods"][method][budget] for method, budget in columns)]
    rows = [
        [kind, str(own["count"]), *(f"{100 * each['by_kind'][kind]['accuracy']:.0f}" for each in shown)]
        for kind, own in report["none"]["by_kind"].items()
    ]
    headings = [f"`{method}` `{budget}`" for method, budget in columns]
    return _table(["kind", "questions", "`none`", *headings], rows)


def _accuracy(found: Mapping[str, Any]) -> str:
    low, high = found["ci95"]
    return f"{100 * found['accuracy']:.1f} ±{50 * (high - low):.1f} ({100 * found['relative']:.0f})"


def _difference(found: Mapping[str, Any]) -> str:
    low, high = found["ci95"]
    # Samples that are all alike have no interval.
    interval = f" ({100 * low:.1f} to {100 * high:.1f})" if low < high else ""
    return f"{100 * found['mean']:.1f}{interval}"


def robot_success(figures: Figures) -> str:
    """Return the share of episodes in which the pocket robot succeeds, by method and budget."""
    report = figures["report"]

    def cell(row: Mapping[str, Any]) -> str:
        low, high = row["ci95"]
        return f"{100 * row['success']:.1f} ({100 * low:.1f} to {100 * high:.1f})"

    none, table = _robot_table(report, cell, "method")
    return (
        f"{report['episodes']} episodes of each row. Measured on {_where(figures)}. Unpruned: {cell(none)}\n\n{table}"
    )


def robot_paired(figures: Figures) -> str:
    """Return how many points more than SinkPruner each method has on the same episodes, by budget."""
    report = figures["report"]
    paired = {**report, "rows": [row for row in report["rows"] if row["budget"] == "none" or row["versus_first"]]}
    return _robot_table(paired, lambda row: _difference(row["versus_first"]), "method")[1]


def robot_times(figures: Figures) -> str:
    """Return the median time of a chunk by method and budget, and how many times as fast as unpruned it is."""
    report = figures["report"]
    unpruned = report["rows"][0]["chunk_ms"]

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['chunk_ms']:.1f} ({unpruned / row['chunk_ms']:.2f}x)"

    return _robot_table(report, cell, f"method; `none` {unpruned:.1f} ms")[1]


def _robot_table(
    report: Mapping[str, Any], cell: Callable[[Mapping[str, Any]], str], heading: str
) -> tuple[Mapping[str, Any], str]:
    """Return the row of the unpruned policy, and a table of the others."""
    none, *others = report["rows"]
    found: dict[str, dict[str, str]] = {}
    for row in others:
        found.setdefault(row["method"], {})[row["budget"]] = cell(row)
    budgets = list(next(iter(found.values())))
    rows = [[f"`{name}`", *(found[name].get(budget, "-") for budget in budgets)] for name in in_order_of_rows(found)]
    return none, _table([heading, *(f"`{budget}`" for budget in budgets)], rows)


def peers_short(figures: Figures) -> str:
    """Return the rows of other engines: the fastest form of each, and ours unpruned."""
    report = figures["report"]
    rows = [
        [
            f"`{row['engine']}` {row['form']}, `{row['way']}`",
            f"{row['ms']['ttft']['median']:.0f}",
            f"{row['ms']['per_token']['median']:.0f}",
        ]
        for row in sorted(report["rows"], key=lambda row: row["ms"]["ttft"]["median"])
    ]
    plan = report["plan"]
    return (
        f"The same model and pictures in int4, medians of {plan['repeat']} rounds;\n"
        f"{figures['date']}, {plan['threads']} threads of a shared {report['machine']}:\n\n"
        + _table(["engine", "TTFT ms", "a token ms"], rows)
    )
