"""Times a decoder at given numbers of rows: a prefill of each, and a token after it.

    python benchmarks/decoder_rows.py BUNDLE --backend openvino --rows 40,64,76,124,136
    python benchmarks/decoder_rows.py BUNDLE --rows 60,600 --repeat 40 --json rows.json

Counts take turns in every round, forwards and then backwards. Rows are of text, which takes as long as a picture. A
prefill is timed without the head. The table compares each time, relative to the first count, with its ideal: the
FLOPs of a prefill, the bytes of weights and cache of a token. Rows that a library runs in blocks, or copies of a
cache, make them differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from sinkprune import Pipeline
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.flops import decode_bytes, prefill_flops
from sinkprune.deadlines.measuring import DecoderTimes
from sinkprune.runtime.backends import THREADS
from sinkprune.runtime.backends.known import KNOWN

_TABLE_WIDTH = 140


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=_counts, default=[60, 600], help="counts (default: 60,600)")
    parser.add_argument(
        "--repeat", type=int, default=9, help="rounds after the first, which does not count (default: 9)"
    )
    parser.add_argument("--backend", choices=[*KNOWN], default="ort-cpu")
    parser.add_argument("--threads", type=THREADS)
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write every measurement")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        raise UsageError(f"--repeat is {options.repeat}, expected at least 1.")
    check_outputs(json_outputs(options.json), [], [options.bundle])
    pipeline = Pipeline.load(options.bundle, backend=options.backend, threads=options.threads)
    counts = options.rows
    times = DecoderTimes(pipeline.chain, pipeline.embedding, counts)
    for number in range(options.repeat + 1):
        times.run(counted=number > 0)
    prefills = {count: [sum(segments) for segments in times.prefills[count]] for count in counts}
    tokens = {count: times.late(count) for count in counts}
    manifest = pipeline.bundle.manifest
    layers = manifest.language_model.num_layers
    flops = {count: prefill_flops(manifest.language_model, [count] * layers) for count in counts}
    read = {count: decode_bytes(manifest, cache_bytes(pipeline, count)) for count in counts}
    console = Console(width=_TABLE_WIDTH, soft_wrap=True)
    table = Table("rows", "prefill ms", "us a row", "x", "by FLOPs", "a token ms", "GB/s", "x", "by bytes", box=None)
    for count in counts:
        prefill, token = np.median(prefills[count]), np.median(tokens[count])
        first = np.median(prefills[counts[0]]), np.median(tokens[counts[0]])
        cells = (
            *(spread(prefills[count]), f"{1e3 * prefill / count:.0f}"),
            *(f"{prefill / first[0]:.2f}", f"{flops[count] / flops[counts[0]]:.2f}"),
            *(spread(tokens[count]), f"{read[count] / token / 1e6:.1f}"),
            *(f"{token / first[1]:.3f}", f"{read[count] / read[counts[0]]:.3f}"),
        )
        table.add_row(str(count), *cells)
    backend = pipeline.backend
    console.print(
        f"{manifest.checkpoint.source}, weights {manifest.weights.name}, {backend.name}, {backend.threads} threads; "
        f"median (a tenth below, a tenth above) of {options.repeat} rounds; x is over {counts[0]} rows",
        highlight=False,
        markup=False,
    )
    console.print(table)
    found = [
        {"rows": count, "prefill_ms": prefills[count], "token_ms": tokens[count], "bytes": read[count]}
        for count in counts
    ]
    write_json(options.json, found)


def cache_bytes(pipeline: Pipeline, count: int) -> int:
    """Return the bytes of a cache of so many rows, in the backend's type."""
    model, backend = pipeline.chain.model, pipeline.backend
    size = 2 if backend.cache in ("bf16", "fp16") else pipeline.chain.dtype.itemsize
    return 2 * count * model.num_layers * model.num_kv_heads * model.head_dim * size


def spread(ms: Sequence[float]) -> str:
    """Return the median, and the tenths from either end, as text."""
    low, middle, high = np.quantile(ms, (0.1, 0.5, 0.9))
    return f"{middle:.1f} ({low:.1f}, {high:.1f})"


def _counts(text: str) -> list[int]:
    """Parse comma-separated counts of rows, each at least 1."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts) or len({*parts}) < len(parts):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of different counts from 1 on, like 60,600")
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(main())
