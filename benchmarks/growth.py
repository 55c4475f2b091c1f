"""Measures how tower, sanitizer, prefill and decode grow with visual tokens, prompt, new tokens and pictures.

    python benchmarks/growth.py
    python benchmarks/growth.py --tokens 144,576,2304 --width 512 --rounds 5 --json growth.json --plot growth.png

The bundles have small shapes and random weights, one for each number of visual tokens. One axis grows at a time, and
sizes take turns in every round. The table has medians and exponents: the slope of a line through all points in
logarithms, with its 95 % interval, and the slope between the two largest sizes. 1 is linear, 2 is the limit of
attention; fixed costs lower the exponent of small sizes. 9216 visual tokens take 3 GB of memory with the two heads of
--width 256: their attention has 0.7 GB of scores.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkprune import Pipeline
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs, write_whole
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import THREADS
from sinkprune.runtime.profiling.plot import PLOT_SUFFIXES, figure_bytes, import_matplotlib
from sinkprune.runtime.steps.answer import Answer

PATCH = 14
LAYERS, BLOCKS = 8, 4
BUDGET = "retain-64"
PARTS = ("vision", "sanitizer", "prefill", "decode")
AXES = {"visual tokens": "unpruned", "prompt": "text tokens", "new tokens": "generated", "pictures": "of one size"}
"""The axes of growth, and the way each grows."""


class Line(NamedTuple):
    """A line fitted to points in logarithms."""

    exponent: float
    interval: tuple[float, float]
    """95 %."""


@dataclass(frozen=True)
class Growth:
    """The milliseconds of one part along one axis."""

    axis: str
    part: str
    sizes: list[int]
    ms: list[list[float]]
    """By size, then by round."""

    @property
    def line(self) -> Line:
        """The line through all rounds of all sizes."""
        return fitted([(size, value) for size, values in zip(self.sizes, self.ms, strict=True) for value in values])

    @property
    def last_exponent(self) -> float:
        """The exponent between the medians of the two largest sizes."""
        before, last = (statistics.median(values) for values in self.ms[-2:])
        return math.log(last / before) / math.log(self.sizes[-1] / self.sizes[-2])


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line of least squares to the logarithms of three or more points above 0, of two or more sizes."""
    x, y = np.log(np.array(points, np.float64)).T
    x -= x.mean()
    y -= y.mean()
    slope = float(x @ y / (x @ x))
    error = math.sqrt(float(((y - slope * x) ** 2).sum()) / (len(points) - 2) / float(x @ x))
    return Line(slope, (slope - 1.96 * error, slope + 1.96 * error))


def costs(answer: Answer) -> dict[str, float]:
    """Return milliseconds by part, without parts that took no time, such as the sanitizer of an unpruned answer."""
    decode = (answer.ms["per_token"] or 0.0) * (len(answer.token_ids) - 1)
    found = {part: answer.ms[part] or 0.0 for part in PARTS if part != "decode"}
    return {part: ms for part, ms in {**found, "decode": decode}.items() if ms > 0}


def table(growths: Sequence[Growth]) -> str:
    """Return a line for each axis and part: the exponents, and medians by size."""
    lines = []
    for growth in growths:
        sizes = ", ".join(
            f"{size}: {statistics.median(values):.1f}" for size, values in zip(growth.sizes, growth.ms, strict=True)
        )
        exponent, (low, high) = growth.line
        exponents = f"{exponent:5.2f} ({low:.2f} to {high:.2f}), last {growth.last_exponent:.2f}"
        lines.append(f"{growth.axis:<14}{growth.part:<11}{exponents}   ms at {sizes}\n")
    return "".join(lines)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tokens", type=_sizes, default=[144, 576, 1296, 2304, 5184, 9216], help="squares, up to 9216"
    )
    parser.add_argument("--prompts", type=_sizes, default=[32, 128, 512, 1024], help="words of the prompt")
    parser.add_argument("--new", type=_sizes, default=[8, 32, 128], help="new tokens")
    parser.add_argument("--pictures", type=_sizes, default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=256, help="of tower and decoder, a multiple of 128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=THREADS)
    parser.add_argument("--json", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    sides = [math.isqrt(tokens) for tokens in options.tokens]
    if any(side**2 != tokens or not 12 <= side <= 96 for side, tokens in zip(sides, options.tokens, strict=True)):
        raise UsageError(f"--tokens is {options.tokens}, expected squares from 144 to 9216, as in 144,576,2304,9216.")
    if options.width < 128 or options.width % 128 or options.rounds < 2:
        raise UsageError("--width must be a multiple of 128, and --rounds at least 2.")
    check_outputs([*json_outputs(options.json), *([(options.plot, PLOT_SUFFIXES)] if options.plot else [])])
    if options.plot:
        import_matplotlib()
    growths = []
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        pipelines = {
            tokens: _pipeline(Path(folder), tokens, options.width, 1, options.threads) for tokens in options.tokens
        }
        several = _pipeline(Path(folder), 144, options.width, max(options.pictures), options.threads)
        small = pipelines[min(options.tokens)]
        asked = {
            "visual tokens": {tokens: (pipeline, 1, 8, 8) for tokens, pipeline in pipelines.items()},
            "prompt": {words: (small, 1, words, 8) for words in options.prompts},
            "new tokens": {new: (small, 1, 8, new) for new in options.new},
            "pictures": {count: (several, count, 8, 8) for count in options.pictures},
        }
        for axis, requests in asked.items():
            growths += _measured(axis, requests, options.rounds)
    sys.stdout.write(table(growths))
    data = [{**asdict(one), **one.line._asdict(), "last_exponent": one.last_exponent} for one in growths]
    write_json(options.json, data)
    if options.plot:
        write_whole(options.plot, plotted(growths, options.plot.suffix))


def _measured(axis: str, requests: Mapping[int, tuple[Pipeline, int, int, int]], rounds: int) -> list[Growth]:
    """Measure every size in turn, after a warm-up round; pruned for the sanitizer, unpruned for other parts."""
    found: dict[str, dict[int, list[float]]] = {part: {size: [] for size in requests} for part in PARTS}
    noise = np.random.default_rng(0)
    for turn in range(-1, rounds):
        for size, (pipeline, pictures, words, new) in requests.items():
            shown = [noise.integers(0, 256, (64, 64, 3), np.uint8) for _ in range(pictures)]
            prompt = " ".join(["cup"] * words)
            for budget in ("none", BUDGET):
                answer = pipeline.generate(shown, prompt, budget=budget, max_new_tokens=new, min_new_tokens=new)
                for part, ms in costs(answer).items():
                    if turn >= 0 and (part == "sanitizer") == (budget == BUDGET):
                        found[part][size].append(ms)
    return [
        Growth(axis, part, list(by_size), list(by_size.values()))
        for part, by_size in found.items()
        if len(by_size) > 1
    ]


def _pipeline(folder: Path, tokens: int, width: int, pictures: int, threads: int | None) -> Pipeline:
    """Export and load a bundle of small shapes whose pictures have `tokens` visual tokens."""
    name = f"{tokens}-{pictures}"
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(config(tokens, width)))
    request = ExportRequest(str(folder / name), budgets=(BUDGET,), random_weights=True, max_images=pictures)
    export_bundle(request, folder / f"{name}-bundle")
    return Pipeline.load(folder / f"{name}-bundle", backend="ort-cpu", threads=threads)


def config(tokens: int, width: int) -> dict[str, Any]:
    """Return the configuration of a LLaVA with heads of 128, whose pictures have `tokens` visual tokens."""
    heads = width // 128
    return {
        "model_type": "llava",
        "image_token_index": 300,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": width,
            "intermediate_size": 4 * width,
            # One more than computed: the features are those of the last block but one.
            "num_hidden_layers": BLOCKS + 1,
            "num_attention_heads": heads,
            "image_size": PATCH * math.isqrt(tokens),
            "patch_size": PATCH,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": 320,
            "max_position_embeddings": 32768,
        },
    }


def plotted(growths: Sequence[Growth], suffix: str) -> bytes:
    """Draw a panel for each axis with a line for each part, and return the bytes of a picture with `suffix`."""
    axes = list(dict.fromkeys(growth.axis for growth in growths))
    figure = import_matplotlib()(figsize=(4 * len(axes), 3.6), layout="constrained")
    for number, axis in enumerate(axes, start=1):
        panel = figure.add_subplot(1, len(axes), number)
        for growth in (one for one in growths if one.axis == axis):
            medians = [statistics.median(values) for values in growth.ms]
            panel.loglog(growth.sizes, medians, "o-", label=f"{growth.part} {growth.line.exponent:.2f}")
        panel.set_xlabel(f"{axis}, {AXES[axis]}")
        panel.set_ylabel("ms, median")
        panel.legend(fontsize="small")
    return figure_bytes(figure, suffix)


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if len(sizes) < 2 or sizes[0] < 1:
        raise argparse.ArgumentTypeError(f"'{text}': expected two or more numbers from 1 on, as in 8,32,128")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
