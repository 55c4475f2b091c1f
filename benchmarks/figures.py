"""Measures the figures of README.md and docs/ again on this machine, and writes them between their markers.

    python benchmarks/figures.py                    # savings and accuracy: about ten minutes on two cores
    python benchmarks/figures.py savings            # one part
    python benchmarks/figures.py --render           # no measuring: writes the tables of the kept measurements again
    python benchmarks/figures.py varied --rows dart,fastv    # rows of single methods; the others stay

Each part runs commands and keeps their JSON in docs/measurements/figures/PART.json. Its tables replace the text
between `<!-- figures: TABLE -->` and `<!-- end of figures -->` in every page. Most other parts take 10 to 120 minutes
of a core each, and `peers` needs the engines of docs/peers.md, so these run only if named.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from figure_rows import FIRST, plot_of, with_rows
from figure_tables import (
    Figures,
    accuracy_short,
    confidence_curve,
    kinds,
    methods_full,
    methods_short,
    paired,
    peers_short,
    robot_success,
    robot_times,
    savings_full,
    savings_short,
    ttft_full,
    versus_full,
)
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import write_whole
from sinkprune.runtime.system.processor import instructions

ROOT = Path(__file__).parent.parent
WORK = Path("build/figures")
KEPT = Path("docs/measurements/figures")
BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n?).*?(\n?<!-- end of figures -->)", re.DOTALL)


class Part(NamedTuple):
    """What one run measures, and the tables that show it."""

    commands: tuple[str, ...]
    """Shell words; `{work}` is a folder for bundles, `{json}` the file that the last command writes."""
    tables: Mapping[str, Callable[[Figures], str]]
    """The text of each table, by the name in its marker."""
    by_default: bool = True
    methods: tuple[str, ...] = ()
    """The methods whose rows can be measured alone, in order. The last command is then `sinkprune-evaluate`."""
    plot: str = ""
    """The path of `{plot}`, the picture of such rows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with `arguments`, or the process's own if None; returns the exit code."""
    return run_command(_figures, arguments)


def _figures(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--render", action="store_true", help="write the tables of kept measurements, measure none")
    parser.add_argument(
        "--rows",
        metavar="METHOD,METHOD",
        type=lambda text: text.split(","),
        help="measure rows of these methods only",
    )
    options = parser.parse_args(arguments)
    if wrong := sorted(set(options.parts) - set(PARTS)):
        raise UsageError(f"found part '{wrong[0]}', expected one of {', '.join(PARTS)}.")
    parts = options.parts or [name for name, part in PARTS.items() if part.by_default]
    if options.rows:
        _measure_rows(parts, options.rows)
    elif not options.render:
        for name in parts:
            _keep(name, _measure(name))
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


def _measure_rows(parts: Sequence[str], methods: Sequence[str]) -> None:
    """Measure the rows `methods` of the only part of `parts`, and keep them with the others. Raises `UsageError`."""
    if len(parts) != 1 or (wrong := [name for name in methods if name not in PARTS[parts[0]].methods]):
        expected = " or ".join(f"part {name} and its methods" for name, part in PARTS.items() if part.methods)
        found = f"'{wrong[0]}'" if len(parts) == 1 else "none or several parts"
        raise UsageError(f"found {found} with --rows, expected {expected}.")
    part = PARTS[parts[0]]
    kept = json.loads((ROOT / KEPT / f"{parts[0]}.json").read_text("utf-8"))
    new = _measure(parts[0], ("--methods", ",".join([FIRST, *methods])), str(WORK / "rows.png"))
    merged = with_rows(kept, new, methods, part.methods)
    _keep(parts[0], merged)
    write_whole(ROOT / part.plot, plot_of(merged["report"], Path(part.plot).suffix))


def _measure(name: str, last: Sequence[str] = (), plot: str | None = None) -> dict[str, Any]:
    """Run a part's commands and return what the last one wrote. `last` are more words of the last command."""
    part, work, written = PARTS[name], ROOT / WORK, ROOT / WORK / f"{name}.json"
    plot = part.plot if plot is None else plot
    work.mkdir(parents=True, exist_ok=True)
    for command in part.commands:
        words = [word.format(work=WORK, json=written.relative_to(ROOT), plot=plot) for word in shlex.split(command)]
        words += last if command == part.commands[-1] else ()
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
    shown = [command.replace("{work}/", "").format(json=f"{name}.json", plot=part.plot) for command in part.commands]
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "instructions": instructions(),
        "commands": shown,
        "report": report,
    }


def _keep(name: str, figures: Figures) -> None:
    """Write what part `name` measured."""
    (ROOT / KEPT).mkdir(parents=True, exist_ok=True)
    write_whole(ROOT / KEPT / f"{name}.json", (json.dumps(figures, indent=1) + "\n").encode())


_METHODS = (
    "sinkpruner,downsample,sinkpruner-text,sinkpruner-heads,sinkpruner-text-heads,random,uniform,fastervlm,visionzip,"
    "visionzip+filter,divprune,dart,cdpruner,mmtok,prunesid,vispruner,holov,scope,vscan,occamtoken,fastv,pyramiddrop,sparsevlm,"
    "sinkpruner-no-sanitizer,sinkpruner-no-text-pruner,"
    "sinkpruner-no-diversity,sinkpruner-no-outlier-removal,sinkpruner-no-aggregation"
)
_VARIED = (
    "sinkpruner,downsample,downsample-ttft,sinkpruner-text,sinkpruner-heads,sinkpruner-text-heads,random,uniform,"
    "fastervlm,visionzip,visionzip+filter,divprune,dart,cdpruner,mmtok,prunesid,vispruner,holov,scope,vscan,occamtoken,"
    "fastv,pyramiddrop,sparsevlm,sinkpruner-no-text-pruner,sinkpruner-no-outlier-removal,sinkpruner-no-diversity"
)
_ROBOT = (
    "sinkpruner,downsample,sinkpruner-text,sinkpruner-no-text-pruner,sinkpruner-no-outlier-removal,sinkpruner-no-diversity,"
    "random,uniform,divprune,fastervlm,visionzip,dart,vispruner,cdpruner,vscan,mmtok,prunesid,holov,scope,fastv,"
    "sinkpruner-heads,occamtoken"
)
_KINDS = (
    ("downsample", "retain-32"),
    ("sinkpruner", "retain-128"),
    ("sinkpruner", "retain-64"),
    ("sinkpruner", "retain-32"),
    ("dart", "retain-32"),
    ("visionzip", "retain-32"),
    ("random", "retain-32"),
)
_VARIED_KINDS = [
    (method, "prune-77.8")
    for method in [
        "downsample",
        "sinkpruner",
        "sinkpruner-text-heads",
        "sinkpruner-no-text-pruner",
        "cdpruner",
        "dart",
    ]
]
_READING = ("downsample", "sinkpruner", "sinkpruner-text", "sinkpruner-heads", "sinkpruner-text-heads")
_TUNED = (
    "sinkpruner,downsample,sinkpruner-no-outlier-removal,sinkpruner-no-aggregation,sinkpruner-no-diversity,"
    "sinkpruner-no-text-pruner,visionzip,visionzip+filter,fastervlm,divprune,dart,vispruner,random"
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
            # Equal means on the test pictures, whose photos are others than those of the validation set.
            "python -m sinkprune.demo.write_scenes {work}/test 80",
            "sinkprune-calibrate evidence {work}/methods --data {work}/test/scenes.jsonl --threads 1",
            # Two threads take longer than one for so small a model.
            "sinkprune-evaluate {work}/methods --threads 1 --json {json} --plot {plot}",
        ),
        {
            "methods": methods_full,
            "methods-short": methods_short,
            "methods-versus": versus_full,
            "methods-ttft": ttft_full,
            "methods-kinds": partial(kinds, columns=_KINDS),
        },
        by_default=False,
        methods=tuple(_METHODS.split(",")),
        plot="docs/accuracy.png",
    ),
    "varied": Part(
        (
            "python -m sinkprune.demo.write_scenes {work}/varied-validation 60 validation varied-scenes",
            "sinkprune-export demo/pocket-qwen3 -o {work}/pocket-qwen3 --force",
            "sinkprune-calibrate attention {work}/pocket-qwen3 --data {work}/varied-validation/scenes.jsonl "
            "--budgets none --heads {work}/qwen3-heads.json",
            f"sinkprune-export demo/pocket-qwen3 -o {{work}}/varied --force --heads {{work}}/qwen3-heads.json "
            f"--methods {_VARIED} --budgets prune-66.7,prune-77.8,prune-88.9,prune-88.9+serial",
            "python -m sinkprune.demo.write_scenes {work}/varied-test 60 test varied-scenes",
            "sinkprune-calibrate evidence {work}/varied --data {work}/varied-test/scenes.jsonl --threads 1",
            "sinkprune-evaluate {work}/varied --data varied-scenes --threads 1 --json {json} --plot {plot}",
        ),
        {
            "varied": methods_full,
            "varied-versus": versus_full,
            "varied-ttft": ttft_full,
            "varied-kinds": partial(kinds, columns=_VARIED_KINDS),
            "varied-reading": partial(paired, names=_READING, budgets=("prune-77.8", "prune-88.9")),
        },
        by_default=False,
        methods=tuple(_VARIED.split(",")),
        plot="docs/measurements/accuracy-qwen3.png",
    ),
    "reading": Part(
        (
            "python -m sinkprune.demo.write_scenes {work}/validation 60 validation",
            "sinkprune-export demo/pocket -o {work}/pocket --force",
            "sinkprune-calibrate attention {work}/pocket --data {work}/validation/scenes.jsonl --budgets none "
            "--heads {work}/heads.json",
            "sinkprune-export demo/pocket -o {work}/pocket-heads --force --heads {work}/heads.json "
            "--methods sinkpruner,downsample,sinkpruner-heads,sinkpruner-text,sinkpruner-text-heads "
            "--budgets retain-64,retain-32,retain-64+serial,retain-32+serial",
            "sinkprune-evaluate {work}/pocket-heads --threads 1 --json {json} --answers {work}/reading.jsonl",
        ),
        {"reading": paired},
        by_default=False,
    ),
    "outliers": Part(
        (
            "python benchmarks/train_pocket_model.py {work}/pocket-tuned --state {work}/tuned.pt "
            "--model llava-outliers --threads 1",
            f"sinkprune-export {{work}}/pocket-tuned -o {{work}}/tuned --force --methods {_TUNED} "
            "--budgets retain-64,retain-32,retain-64+serial,retain-32+serial",
            "sinkprune-calibrate norms {work}/tuned --json {work}/norms.json --plot docs/norms-tuned.png",
            "sinkprune-calibrate attention {work}/tuned --threads 1 --limit 200 --budgets retain-64,retain-32 "
            "--methods sinkpruner,sinkpruner-no-outlier-removal,fastervlm,visionzip --json {work}/attention.json",
            "sinkprune-evaluate {work}/tuned --threads 1 --json {json} --answers {work}/outliers.jsonl",
        ),
        {"outliers": paired},
        by_default=False,
    ),
    "planted": Part(
        (
            "sinkprune-export demo/pocket -o {work}/planted --force --budgets retain-64,retain-32 "
            "--methods sinkpruner,downsample,sinkpruner-no-outlier-removal,dart,visionzip+filter,visionzip,fastervlm,"
            "divprune,random",
            "sinkprune-evaluate {work}/planted --plant-outliers --threads 1 --json {json}",
        ),
        {"planted": paired},
        by_default=False,
    ),
    "robot": Part(
        (
            "python benchmarks/robot/write_moments.py {work}/moments --tables 100",
            "sinkprune-export demo/pocket-robot -o {work}/robot --force --max-images 2",
            "sinkprune-calibrate attention {work}/robot --data {work}/moments/moments.jsonl --budgets none "
            "--limit 200 --heads {work}/robot-heads.json",
            "sinkprune-export demo/pocket-robot -o {work}/robot --force --max-images 2 "
            f"--heads {{work}}/robot-heads.json --methods {_ROBOT}",
            "sinkprune-calibrate evidence {work}/robot --data {work}/moments/moments.jsonl",
            "python benchmarks/robot/robot_success.py {work}/robot --episodes 500 --json {json}",
        ),
        {"robot-success": robot_success, "robot-times": robot_times},
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
