"""Joins the outputs of the parts of benchmarks/gpu.sh: `results.json`, and `results.md` for docs/hardware.md.

    python benchmarks/gpu/gpu_results.py OUTPUT

Exit codes: 0 all parts that could run did; 1 a part failed; 3 no part could run.
"""

from __future__ import annotations

import json
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_parts import PARTS, nvidia_smi
from rows_table import rows_table

NEXT_TO_PYTORCH, NEXT_TO_VLLM, PI0 = "pytorch-llava-1.5-7b", "vllm-llava-1.5-7b", "pytorch-pi0"
PROFILES = ("ort-cuda-llava-1.1b", "ort-cuda-llava-1.5-7b", "tensorrt-profile")
RUN, FAILED, NOT_THERE = "run", "failed", "not there"
NOTHING_THERE = 3
_MACHINE = ("name", "compute_cap", "memory.total", "driver_version", "power.limit")
_SHOWN = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the parts in a folder, print the table, and return the exit code."""
    folder = Path((sys.argv[1:] if arguments is None else arguments)[0])
    results = joined(folder)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = table(results)
    (folder / "results.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    states = {part["state"] for part in results["parts"].values()}
    if FAILED in states:
        return 1
    return 0 if RUN in states else NOTHING_THERE


def joined(folder: Path) -> dict[str, Any]:
    """Return the parts' outputs. A part that ran without readable output has failed."""
    parts: dict[str, dict[str, Any]] = {}
    for name in PARTS:
        state, reason = _state(folder, name)
        found: Any = None
        # Failed tests still report the others; other failed parts have no whole output.
        if state == RUN or (state == FAILED and name == "gpu-tests"):
            try:
                found = _written(folder, name)
            except (OSError, ValueError, KeyError, ElementTree.ParseError) as error:
                if state == RUN:
                    state, reason = FAILED, f"it ran, and what it wrote cannot be read: {error}"
        if name == "gpu-tests" and found and state == RUN and found["passed"] == 0:
            state, reason = NOT_THERE, f"all {found['skipped']} tests were skipped: {found['why_skipped']}"
        parts[name] = {"state": state, "reason": reason, "found": found}
    answer = nvidia_smi(",".join(_MACHINE))
    fields = (word.strip() for word in (answer or "").split(","))
    machine = None if answer is None else dict(zip(_MACHINE, fields, strict=False))
    return {"machine": machine, "parts": parts}


def table(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    machine, parts = results["machine"], results["parts"]
    lines = [f"### {_machine_line(machine)}", "", "| part | state | |", "|---|---|---|"]
    lines += [f"| `{name}` | {part['state']} | {_cell(_summary(name, part))} |" for name, part in parts.items()]
    kernels = parts["kernels"]["found"]
    if kernels:
        lines += ["", "| sanitizer | median us | p95 us |", "|---|---|---|"]
        lines += [f"| {way} | {median:.1f} | {p95:.1f} |" for way, (median, p95) in kernels.items()]
    for name in PROFILES:
        if parts[name]["found"]:
            lines += ["", *_profile_table(name, parts[name]["found"])]
    for name in (NEXT_TO_PYTORCH, NEXT_TO_VLLM, PI0):
        if parts[name]["found"]:
            lines += ["", f"`{name}`:", "", rows_table(parts[name]["found"]).rstrip()]
    if parts["frames"]["found"]:
        lines += ["", "| frame | processor | graph ms | host ms | largest difference |", "|---" * 5 + "|"]
        for row in parts["frames"]["found"]:
            graph, host = (f"{statistics.median(row[way]):.2f}" for way in ("graph_ms", "host_ms"))
            lines.append(f"| {row['frame']} | {row['processor']} | {graph} | {host} | {row['difference']:g} |")
    lines += ["", "| target of captured graphs | wanted | found |", "|---|---|---|"]
    lines += [f"| {what} | {wanted} | {found} |" for what, wanted, found in targets(parts)]
    return "\n".join(lines) + "\n"


def targets(parts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what captured graphs are for: the target, the limit, and what was found."""
    rows, chunks = (parts[name]["found"] or {} for name in (NEXT_TO_PYTORCH, PI0))
    small = (parts["ort-cuda-llava-1.1b"]["found"] or {"budgets": {}})["budgets"]

    def ms(found: Mapping[str, Any], budget: str, part: str) -> float | None:
        times = found.get(f"ort-cuda {budget}", {}).get(part)
        return statistics.median(times) if times else None

    least, pruned = ms(rows, "none", "prefill"), ms(rows, "retain-64", "prefill")
    times = {name: one["ms"]["ttft"]["median"] for name, one in small.items()}
    latest = max(times, key=times.__getitem__) if times else "none"
    chunk = [time for name in chunks if (time := ms(chunks, name.removeprefix("ort-cuda "), "ttft")) is not None]
    found = [
        ("llava-1.5-7b, `retain-64`, a token", "at most 5.0 ms", ms(rows, "retain-64", "per_token"), 5.0),
        (
            "llava-1.5-7b, `retain-64`, TTFT of a frame of 1920x1080",
            "at most 14 ms",
            ms(rows, "retain-64", "ttft"),
            14.0,
        ),
        (
            "llava-1.5-7b, prefill of `retain-64` over that of `none`",
            "at most 0.286 (3.5 times as fast)",
            pruned / least if least and pruned else None,
            1 / 3.5,
        ),
        ("pi0, three cameras, the quickest budget's chunk", "at most 32 ms", min(chunk, default=None), 32.0),
        (
            f"llava-1.1b, TTFT of the latest budget (`{latest}`) over that of `none`",
            "at most 1",
            times[latest] / times["none"] if "none" in times else None,
            1.0,
        ),
    ]
    return [
        (what, wanted, "not measured" if value is None else f"{value:.3g}, {'met' if value <= most else 'missed'}")
        for what, wanted, value, most in found
    ]


def _state(folder: Path, name: str) -> tuple[str, str | None]:
    """Return a part's state and reason, for a failed part with the last line of its log."""
    try:
        state, _, reason = (folder / f"{name}.state").read_text(encoding="utf-8").partition("\n")
    except OSError:
        return NOT_THERE, "it was not begun"
    reason = reason.strip()
    if state == FAILED and (folder / f"{name}.log").is_file():
        lines = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        reason = f"{reason}: {last[-_SHOWN:]}" if last else reason
    return state, reason or None


def _written(folder: Path, name: str) -> Any:
    """Return a part's output besides its log; None for parts without output."""
    if name == "gpu-tests":
        return _tests(folder / "gpu-tests.xml")
    if name == "kernels":
        ways: dict[str, list[float]] = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))["us"]
        return {way: [statistics.median(times), _p95(times)] for way, times in ways.items()}
    if name in (NEXT_TO_PYTORCH, NEXT_TO_VLLM, PI0):
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["ms"]
    if name == "frames":
        rows: list[dict[str, Any]] = json.loads((folder / "frames.json").read_text(encoding="utf-8"))
        return rows
    if name in PROFILES:
        report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        base = report["budgets"]["none"]["ms"]["prefill"]["median"]
        for budget in report["budgets"].values():
            selection = sum(budget["ms"][part]["median"] for part in ("sanitizer", "select"))
            budget["selection_share"] = selection / base
        return report
    return None


def _tests(path: Path) -> dict[str, Any]:
    """Return the numbers of passed, failed and skipped tests, and the first reason of skipping."""
    # The file is safe to parse, because pytest wrote it in this run.
    root = ElementTree.parse(path).getroot()
    total, failures, errors, skips = (
        sum(int(suite.get(kind, 0)) for suite in root.iter("testsuite"))
        for kind in ("tests", "failures", "errors", "skipped")
    )
    skipped = root.find(".//skipped")
    return {
        "passed": total - failures - errors - skips,
        "failed": failures + errors,
        "skipped": skips,
        "why_skipped": None if skipped is None else skipped.get("message"),
    }


def _summary(name: str, part: Mapping[str, Any]) -> str:
    """Return a line about a part's result."""
    found, reason = part["found"], part["reason"] or ""
    if name != "gpu-tests" or not found or part["state"] == NOT_THERE:
        return reason
    counts = ", ".join(f"{found[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    return f"{counts}; {reason}" if reason else counts


def _profile_table(name: str, report: Mapping[str, Any]) -> list[str]:
    """Return the table of one profile's budgets."""
    power = report.get("power")
    heads = ["budget", "visual tokens", "TTFT ms", "prefill ms", "prefill", "by FLOPs", "eff.", "selection", "TTFT"]
    heads += ["a token ms", *(["J a request", "W"] if power else [])]
    lines = [
        f"`{name}`: {report['model']}, {report['precision']}, {report['backend']}, {report['prompt_tokens']} text "
        f"and {report['new_tokens']} new tokens, medians (p95) of {report['repeat']} interleaved rounds",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    for budget, found in report["budgets"].items():
        ms = found["ms"]
        token = ms["per_token"]
        cells = [
            f"`{budget}`",
            f"{found['visual_tokens']}, {found['kept_after_sanitizer']}, {found['tokens_per_layer'][-1]}",
            f"{ms['ttft']['median']:.1f} ({ms['ttft']['p95']:.1f})",
            f"{ms['prefill']['median']:.1f} ({ms['prefill']['p95']:.1f})",
            f"{found['speedup']['prefill']:.2f}x",
            f"{found['flops_speedup']['prefill']:.2f}x",
            f"{found['efficiency']['prefill']:.2f}",
            f"{100 * found['selection_share']:.2f} %",
            f"{found['speedup']['ttft']:.2f}x",
            "-" if token is None else f"{token['median']:.1f}",
        ]
        energy = found.get("energy")
        if power and energy:
            cells += [f"{energy['joules']:.2f}", f"{energy['watts']:.0f}"]
        elif power:
            cells += ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _machine_line(machine: Mapping[str, str] | None) -> str:
    if machine is None:
        return "a machine without a GPU that nvidia-smi reports"
    total = machine.get("memory.total", "")
    memory = f", {int(total) / 1024:.0f} GiB" if total.isdecimal() else ""
    return (
        f"{machine['name']} (compute capability {machine.get('compute_cap', '?')}{memory}), driver "
        f"{machine.get('driver_version', '?')}, power limit {machine.get('power.limit', '?')} W"
    )


def _cell(text: str) -> str:
    """Return text without characters that break a table."""
    return " ".join(text.replace("|", "/").split())


def _p95(times: Sequence[float]) -> float:
    return sorted(times)[max(0, -(-95 * len(times) // 100) - 1)]


if __name__ == "__main__":
    sys.exit(main())
