"""Checks that memory and time stay flat over many requests with different pictures and lengths of prompts.

    python benchmarks/flat.py BUNDLE
    python benchmarks/flat.py BUNDLE --requests 500 --budget retain-64 --json flat.json

The first fifth is a warm-up. Then the medians of the first and the last third of the rest are compared. Resident
memory may grow by 1 % or 4 MB, whichever is more, and the time of a request by 10 %. Exit code 1 if one grows more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sinkprune import Pipeline
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.runtime.backends import THREADS
from sinkprune.runtime.backends.known import KNOWN

_PAGE = os.sysconf("SC_PAGE_SIZE")
MOST_TIME = 0.10
MOST_MEMORY, LEAST_MEMORY = 0.01, 4 << 20
"""The growth of memory that is allowed: a share of it, or these bytes if they are more."""
_SIDE = 224
_WORDS = 150


class Drift(NamedTuple):
    """The first value of measurements, and their growth."""

    first: float
    added: float


def drift(values: Sequence[float]) -> Drift:
    """Return the drift of medians of the first and the last third, which single slow requests do not move."""
    third = max(1, len(values) // 3)
    first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
    # The difference is between the middles of the thirds; scale it to the whole.
    return Drift(first, (last - first) * (len(values) / max(1, len(values) - third)))


def is_flat(memory: Drift, seconds: Drift) -> bool:
    """Return whether neither grew by more than allowed."""
    return (
        memory.added <= max(MOST_MEMORY * memory.first, LEAST_MEMORY) and seconds.added <= MOST_TIME * seconds.first
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with `arguments`, or the process's own if None; returns the exit code."""
    flat = True

    def body(given: Sequence[str] | None) -> None:
        nonlocal flat
        flat = _benchmark(given)

    return run_command(body, arguments) or int(not flat)


def _benchmark(arguments: Sequence[str] | None) -> bool:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--budget", default="retain-64")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--backend", choices=[*KNOWN], default="ort-cpu")
    parser.add_argument("--engines", type=Path)
    parser.add_argument("--threads", type=THREADS)
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write every measurement too")
    options = parser.parse_args(arguments)
    if options.requests < 10:
        raise UsageError(f"--requests is {options.requests}, expected 10 or more.")
    check_outputs(json_outputs(options.json), [], [options.bundle])
    pipeline = Pipeline.load(
        options.bundle, backend=options.backend, engines=options.engines, threads=options.threads
    )
    drawn, memory, seconds = np.random.default_rng(0), [], []
    for number in range(options.requests):
        picture = drawn.integers(0, 256, (_SIDE + number % 64, _SIDE, 3), np.uint8)
        # The longest prompts come first, because libraries keep memory for the largest number of rows.
        words = int(drawn.integers(0, _WORDS)) if number > 1 else _WORDS
        prompt = "What is this?" + " Why?" * words
        start = time.perf_counter()
        pipeline.generate(
            picture,
            prompt,
            budget=options.budget if number % 2 else "none",
            max_new_tokens=options.new_tokens,
            min_new_tokens=options.new_tokens,
        )
        seconds.append(time.perf_counter() - start)
        memory.append(_PAGE * int(Path("/proc/self/statm").read_text().split()[1]))
    warm = options.requests // 5
    # Budgets take turns, so add the times of each pair of requests.
    pairs = [a + b for a, b in zip(seconds[warm::2], seconds[warm + 1 :: 2], strict=False)]
    drifts = drift(memory[warm:]), drift(pairs)
    (taken, grown), (took, slower) = drifts
    sys.stdout.write(
        f"{options.requests} requests: {taken / 1e6:.1f} MB resident, {grown / 1e6:+.2f} MB over the last "
        f"{options.requests - warm}; {1e3 * took / 2:.1f} ms a request, {500 * slower:+.2f} ms\n"
    )
    write_json(options.json, {"rss_bytes": memory, "seconds": seconds})
    return is_flat(*drifts)


if __name__ == "__main__":
    sys.exit(main())
