"""Measures the figures of README.md and docs/ again on this machine, and writes them between their markers.

    python benchmarks/figures.py                    # savings: about five minutes on two cores
    python benchmarks/figures.py savings            # one part
    python benchmarks/figures.py --render           # no measuring: writes the tables of the kept measurements again
    python benchmarks/figures.py methods varied --render    # and draws the pictures of these parts
    python benchmarks/figures.py varied --rows dart,fastv    # rows of single methods; the others stay

Each part runs commands and keeps their JSON in docs/measurements/figures/PART.json. Its tables replace the text
between `<!-- figures: TABLE -->` and `<!-- end of figures -->` in every page. Tables that a page names with the
directive `figures-table` are made when the site is built. Most other parts take 10 to 120 minutes of a core each, and
`peers` needs the engines of docs/peers.md, so these run only if named.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from figure_parts import PARTS
from figure_rows import FIRST, plot_of, with_rows
from figure_tables import Figures
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import write_whole
from sinkprune.runtime.processor import instructions

ROOT = Path(__file__).parent.parent
WORK = Path("build/figures")
KEPT = Path("docs/measurements/figures")
BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n?).*?(\n?<!-- end of figures -->)", re.DOTALL)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
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
    if options.render:
        _draw(parts)
    kept = {
        name: json.loads(path.read_text("utf-8")) for name in PARTS if (path := ROOT / KEPT / f"{name}.json").exists()
    }
    for page in pages():
        text = page.read_text("utf-8")
        if (new := rendered(text, kept)) != text:
            write_whole(page, new.encode())
            sys.stdout.write(f"wrote {page.relative_to(ROOT)}\n")


def _draw(parts: Sequence[str]) -> None:
    """Draw the pictures of kept evaluations again."""
    for name in parts:
        if PARTS[name].plot and (path := ROOT / KEPT / f"{name}.json").exists():
            report = json.loads(path.read_text("utf-8"))["report"]
            write_whole(ROOT / PARTS[name].plot, plot_of(report, Path(PARTS[name].plot).suffix))


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
        return (
            block[1] + table(kept[part] | {"methods": kept.get("methods")}) + block[3] if part in kept else block[0]
        )

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


if __name__ == "__main__":
    sys.exit(main())
