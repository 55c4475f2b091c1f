"""Measures the figures of README.md and docs/ again on this machine, and writes them between their markers.

    python benchmarks/figures.py                    # savings and accuracy: about ten minutes on two cores
    python benchmarks/figures.py savings            # one part
    python benchmarks/figures.py --render           # no measuring: writes the tables of the kept measurements again

Each part runs commands and keeps their JSON in docs/measurements/figures/PART.json. Its tables replace the text
between `<!-- figures: TABLE -->` and `<!-- end of figures -->` in every page. Part `methods` takes 40 minutes of a
core, and `peers` needs the engines of docs/peers.md, so both run only if they are named.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import write_whole
from sinkprune.runtime.system.processor import instructions

ROOT = Path(__file__).parent.parent
WORK = Path("build/figures")
KEPT = Path("docs/measurements/figures")
BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n?).*?(\n?<!-- end of figures -->)", re.DOTALL)

Figures = Mapping[str, Any]
"""What a part kept: `date`, `instructions`, `commands`, and `report`, the JSON that the last command wrote."""


class Part(NamedTuple):
    """What one run measures, and the tables that show it."""

    commands: tuple[str, ...]
    """Shell words; `{work}` is a folder for bundles, `{json}` the file that the last command writes."""
    tables: Mapping[str, Callable[[Figures], str]]
    """The text of each table, by the name in its marker."""
    by_default: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with `arguments`, or the process's own if None; returns the exit code."""
    return run_command(_figures, arguments)


def _figures(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--render", action="store_true", help="write the tables of kept measurements, measure none")
    options = parser.parse_args(arguments)
    if wrong := sorted(set(options.parts) - set(PARTS)):
        raise UsageError(f"found part '{wrong[0]}', expected one of {', '.join(PARTS)}.")
    parts = options.parts or [name for name, part in PARTS.items() if part.by_default]
    if not options.render:
        for name in parts:
            _measure(name)
    kept = {
        name: json.loads(path.read_text("utf-8")) for name in PARTS if (path := ROOT / KEPT / f"{name}.json").exists()
    }
    for page in pages():
        text = page.read_text("utf-8")
        if (new := rendered(text, kept)) != text:
            write_whole(page, new.encode())
            sys.stdout.write(f"wrote {page.relative_to(ROOT)}\n")


def pages() -> list[Path]:
    """Return the pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str, kept: Mapping[str, Figures]) -> str:
    """Return a page's text with the tables of the parts in `kept`; other tables stay. Raises `UsageError`."""
    tables = {name: (part, table) for part, each in PARTS.items() for name, table in each.tables.items()}

    def replaced(block: re.Match[str]) -> str:
        if block[2] not in tables:
            raise UsageError(f"found a marker for figures '{block[2]}', expected one of {', '.join(tables)}.")
        part, table = tables[block[2]]
        return block[1] + table(kept[part]) + block[3] if part in kept else block[0]

    return BLOCK.sub(replaced, text)


def _measure(name: str) -> None:
    """Run a part's commands and keep what the last one wrote."""
    work, written = ROOT / WORK, ROOT / WORK / f"{name}.json"
    work.mkdir(parents=True, exist_ok=True)
    for command in PARTS[name].commands:
        words = [word.format(work=WORK, json=written.relative_to(ROOT)) for word in shlex.split(command)]
        sys.stderr.write(f"$ {shlex.join(words)}\n")
        # Commands of this environment, whatever PATH says.
        program = str(Path(sys.executable).parent / words[0])
        if subprocess.run([program, *words[1:]], cwd=ROOT, check=False).returncode != 0:
            raise UsageError(
                f"part '{name}' ended at `{shlex.join(words)}`; its message stands above. Nothing was written."
            )
    report = json.loads(written.read_text("utf-8"))
    for row in report.get("rows", ()):
        # Every single answer of every engine: megabytes that no table shows.
        row.pop("answers", None)
    figures = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "instructions": instructions(),
        "commands": [command.replace("{work}/", "").format(json=f"{name}.json") for command in PARTS[name].commands],
        "report": report,
    }
    (ROOT / KEPT).mkdir(parents=True, exist_ok=True)
    write_whole(ROOT / KEPT / f"{name}.json", (json.dumps(figures, indent=1) + "\n").encode())


def _where(figures: Figures) -> str:
    """Return the date, the machine and the libraries of a measurement, in words."""
    report, names = figures["report"], figures["instructions"].split()
    widest = next((text for name, text in _WIDEST.items() if name in names), "no AVX")
    libraries = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name in _LIBRARIES)
    return f"{figures['date']}, {report['threads']} threads of a shared {report['machine']} ({widest}), {libraries}"


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
    """Return what pruning saves, for the README."""
    report = figures["report"]
    head = ["budget", "visual tokens: picture, into the LLM, last layer", "TTFT ms", "prefill ms"]
    rows = [
        [
            f"`{name}`",
            _reduction(budget),
            f"{budget['ms']['ttft']['median']:.0f}",
            f"{budget['ms']['prefill']['median']:.0f}",
            f"{budget['speedup']['prefill']:.2f}x",
            f"{budget['flops_speedup']['prefill']:.2f}x",
            f"{budget['speedup']['ttft']:.2f}x",
        ]
        for name, budget in report["budgets"].items()
    ]
    columns = [*head, "speed-up of prefill", "ideal, by FLOPs", "speed-up of TTFT"]
    return (
        "`llava-1.1b` (CLIP-L/336 and a 1.1 B Llama, random weights) in fp32 on `ort-cpu`; "
        f"{report['prompt_tokens']} text tokens;\n"
        f"medians of {report['repeat']} interleaved rounds; {_where(figures)}:\n\n{_table(columns, rows)}"
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
            f"{budget['ms']['per_token']['median']:.0f}",
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
    return f"Measured on {_where(figures)}:\n\n{commands}\n\nMedians (p95) of {report['repeat']} rounds:\n\n{table}"


def _spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.0f} ({spread['p95']:.0f})"


def accuracy_short(figures: Figures) -> str:
    """Return the share of the unpruned accuracy that SinkPruner keeps, for the README."""
    budgets = figures["report"]["methods"]["sinkpruner"]
    first, *others = (f"{100 * found['relative']:.0f} % {{}}at `{name}`" for name, found in budgets.items())
    shares = ", ".join([first.format("of its accuracy "), *(other.format("") for other in others)])
    questions, unpruned = figures["report"]["questions"], 100 * figures["report"]["none"]["accuracy"]
    return f"The pocket model keeps {shares} ({questions} questions, {unpruned:.1f} % right unpruned)."


def methods_full(figures: Figures) -> str:
    """Return the accuracy of every method at every budget, with half its 95 % interval and the share kept."""
    report = figures["report"]
    budgets = list(report["methods"]["sinkpruner"])
    tokens = [report["methods"]["sinkpruner"][name]["mean_visual_tokens"] for name in budgets]
    unpruned = report["none"]["mean_visual_tokens"]
    rows = [[f"mean visual tokens a layer, of {unpruned:.0f}", *(f"{each:.0f}" for each in tokens)]]
    rows += [
        [f"`{method}`", *(_accuracy(found[name]) if name in found else "-" for name in budgets)]
        for method, found in report["methods"].items()
    ]
    return f"Measured on {_where(figures)}:\n\n{_table(['method', *(f'`{name}`' for name in budgets)], rows)}"


def methods_short(figures: Figures) -> str:
    """Return what a sanitizer that reads the question wins at the smallest budget, for the README."""
    *_, budget = (methods := figures["report"]["methods"])["sinkpruner"]
    reads, blind = (100 * methods[name][budget]["accuracy"] for name in ("sinkpruner-text", "sinkpruner"))
    return f"`--method sinkpruner-text`, has {reads:.1f} % right at `{budget}`, against {blind:.1f} %."


def _accuracy(found: Mapping[str, Any]) -> str:
    low, high = found["ci95"]
    return f"{100 * found['accuracy']:.1f} ±{50 * (high - low):.1f} ({100 * found['relative']:.0f})"


def peers_short(figures: Figures) -> str:
    """Return the rows of the README about other engines: the fastest form of each, and ours unpruned."""
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
        f"The same model and pictures in int4 ([docs/peers.md](docs/peers.md)), medians of {plan['repeat']} rounds;\n"
        f"{figures['date']}, {plan['threads']} threads of a shared {report['machine']}:\n\n"
        + _table(["engine", "TTFT ms", "a token ms"], rows)
    )


def confidence_curve(figures: Figures) -> str:
    """Return the accuracy and TTFT of each budget, and of budget `auto` with several thresholds."""
    report = figures["report"]
    unpruned = report["budgets"]["none"]["ttft_ms"]
    rows = [
        [f"`{name}`", "", *_closed(found, unpruned), "" if (ms := found["resumed_ms"]) is None else f"{ms:.1f}"]
        for name, found in report["budgets"].items()
    ]
    rows += [
        [f"`auto`, {100 * found['share']:g} %", _steps(found), *_closed(found, unpruned), ""]
        for found in report["curve"]
    ]
    columns = ["budget", "steps, and the share of questions that reach each", "accuracy in %", "of `none`'s"]
    commands = "\n".join(["```", *figures["commands"], "```"])
    return (
        f"Measured on {_where(figures)}:\n\n{commands}\n\n{report['questions']} questions with closed lists about "
        f"{report['pictures']} pictures. `auto` is cross-validated over {report['folds']} parts of the pictures:\n\n"
        + _table([*columns, "TTFT ms", "of `none`'s", "as a later step, ms"], rows)
    )


def _closed(found: Mapping[str, Any], unpruned_ms: float) -> list[str]:
    """Return the cells of accuracy and TTFT, each with its share of the unpruned model's."""
    low, high = found["ci95"]
    accuracy, ttft = f"{100 * found['accuracy']:.1f} ±{50 * (high - low):.1f}", found["ttft_ms"]
    return [accuracy, f"{100 * found['relative']:.1f} %", f"{ttft:.1f}", f"{ttft / unpruned_ms:.2f}"]


def _steps(point: Mapping[str, Any]) -> str:
    """Return the budgets of a point on the curve, as in "`retain-32`, then `none` (12 %)"."""
    first, *others = point["reached"].items()
    return ", then ".join([f"`{first[0]}`", *(f"`{name}` ({100 * share:.0f} %)" for name, share in others)])


_METHODS = (
    "sinkpruner,sinkpruner-text,sinkpruner-heads,downsample,random,uniform,fastervlm,visionzip,visionzip+filter,divprune,"
    "dart,cdpruner,mmtok,prunesid,vispruner,holov,scope,vscan,occamtoken,fastv,pyramiddrop,sparsevlm,"
    "sinkpruner-no-sanitizer,sinkpruner-no-text-pruner,"
    "sinkpruner-no-diversity,sinkpruner-no-outlier-removal,sinkpruner-no-aggregation"
)
PARTS = {
    "savings": Part(
        (
            "sinkprune-export llava-1.1b --random-weights -o {work}/llava-1.1b --force",
            "python demo/photo.py {work}/coffee.jpg",
            "sinkprune-profile {work}/llava-1.1b --image {work}/coffee.jpg "
            "--prompt 'What is in the cup, and what lies on the saucer?' "
            "--repeat 9 --new-tokens 8 --json {json} --plot docs/profile.png",
        ),
        {"savings": savings_short, "savings-in-full": savings_full},
    ),
    "accuracy": Part(
        (
            "sinkprune-export demo/pocket -o {work}/pocket --force",
            "sinkprune-evaluate {work}/pocket --budgets retain-128,retain-64,retain-32 --json {json}",
        ),
        {"accuracy": accuracy_short},
    ),
    "methods": Part(
        (
            "python -m sinkprune.demo.write_scenes {work}/validation 60 validation",
            "sinkprune-export demo/pocket -o {work}/pocket --force",
            "sinkprune-calibrate attention {work}/pocket --data {work}/validation/scenes.jsonl --budgets none "
            "--heads {work}/heads.json",
            "sinkprune-export demo/pocket -o {work}/methods --force --heads {work}/heads.json "
            f"--methods {_METHODS}",
            "sinkprune-calibrate evidence {work}/methods --data {work}/validation/scenes.jsonl",
            "sinkprune-evaluate {work}/methods --json {json} --plot docs/accuracy.png",
        ),
        {"methods": methods_full, "methods-short": methods_short},
        by_default=False,
    ),
    "confidence": Part(
        (
            "sinkprune-export demo/pocket -o {work}/ladders --force --budgets retain-32,retain-64,retain-128,"
            "retain-32+from-retain-64,retain-32+from-retain-128,retain-64+from-retain-128",
            "python -m sinkprune.demo.write_scenes {work}/scenes 80",
            "sinkprune-calibrate confidence {work}/ladders --data {work}/scenes/scenes.jsonl --threads 1 "
            "--json {json}",
        ),
        {"confidence": confidence_curve},
        by_default=False,
    ),
    "peers": Part(
        (
            "python benchmarks/peers.py --folder {work}/peers --json {json} --plot docs/peers.png --repeat 9 "
            "--only 'openvino-genai int4-sym,sinkprune openvino int4,sinkprune ort-cpu+openvino int4,llama-cpp Q4_0'",
        ),
        {"peers": peers_short},
        by_default=False,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
