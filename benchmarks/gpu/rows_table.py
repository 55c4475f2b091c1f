"""The table of `next_to_pytorch.py` and `next_to_vllm.py`. It needs neither PyTorch nor this project."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

PARTS = ("ttft", "vision", "prefill", "per_token")


def rows_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return medians in ms with the least and the most, as Markdown. `found` has the times of each row, by part; of
    some rows not of all parts.
    """
    lines = ["| row | " + " | ".join(PARTS) + " |", "|---" * (len(PARTS) + 1) + "|"]
    for name, times in found.items():
        spreads = [times.get(part) for part in PARTS]
        cells = (f"{statistics.median(ms):.2f} ({min(ms):.2f} to {max(ms):.2f})" if ms else "-" for ms in spreads)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
