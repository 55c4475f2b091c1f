"""The tables and lines that a training writes about itself."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, float | str]]) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def report(entry: Mapping[str, float | str]) -> None:
    """Print the values of `entry` in a line of stderr."""
    line = " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in entry.items())
    sys.stderr.write(f"{line}\n")
