"""Compares the sanitizer, smaller pictures and both, at equal numbers of tokens into the LLM, on the pocket Qwen3-VL.

    sinkprune-export demo/pocket-qwen3 -o qwen3 --methods sinkpruner-no-text-pruner,downsample
    python benchmarks/smaller_pictures.py qwen3

With both, the picture has `SHARES` of its area, and the sanitizer keeps what another budget keeps of that.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.evaluation.replies import Combination, Reply, collect_replies
from sinkprune.calibration.evaluation.statistics import PictureBootstrap
from sinkprune.calibration.tasks import Item, load_task

SANITIZER, SMALLER = "sinkpruner-no-text-pruner", "downsample"
SHARES = {"prune-77.8": (0.64, "prune-66.7"), "prune-88.9": (0.5, "prune-77.8")}
"""The share of a picture's area, and the budget of what is left, which together keep as much as the budget."""


def with_share(item: Item, share: float) -> Item:
    """Return a question about its picture at `share` of its area."""

    def load() -> Image.Image:
        image = item.load_image()
        width, height = (round(side * share**0.5) for side in image.size)
        return image.resize((width, height), Image.Resampling.BICUBIC)

    return replace(item, load_image=load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--limit", type=int, help="the first questions only")
    options = parser.parse_args()
    items = load_task("varied-scenes", options.limit)
    ask = partial(collect_replies, Pipeline.load(options.bundle, threads=1))
    plain = ask(items, [Combination(method, budget) for budget in SHARES for method in (SANITIZER, SMALLER)])
    bootstrap = PictureBootstrap([item.picture for item in items])

    def row(name: str, own: list[Reply], versus: list[Reply]) -> None:
        right, other = ([float(reply.right) for reply in replies] for replies in (own, versus))
        mean, tokens = bootstrap(right), np.mean([reply.mean_visual_tokens for reply in own])
        more = bootstrap(np.subtract(right, other).tolist())
        low, high = more.ci95 or (more.mean, more.mean)
        sys.stdout.write(
            f"{name:36} {tokens:6.1f} tokens {100 * mean.mean:5.1f} %  "
            f"{100 * more.mean:+5.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points\n"
        )

    for budget, (share, rest) in SHARES.items():
        smaller, alone = (
            [reply for reply in plain if reply.combination == Combination(method, budget)]
            for method in (SMALLER, SANITIZER)
        )
        pair = Combination(SANITIZER, rest)
        both = [
            reply for reply in ask([with_share(item, share) for item in items], [pair]) if reply.combination == pair
        ]
        row(f"{budget} {SMALLER}", smaller, smaller)
        row(f"{budget} sanitizer", alone, smaller)
        row(f"{budget} both, {share} of the area", both, smaller)


if __name__ == "__main__":
    main()
