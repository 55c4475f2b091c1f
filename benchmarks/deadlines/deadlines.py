"""Measures requests with a deadline: how many are in time, at which budgets, and how well their times are predicted.

    python benchmarks/deadlines/deadlines.py demo-output/bundle --side 224
    python benchmarks/deadlines/deadlines.py demo-output/bundle --side 224 --load 2,1,1 2,1,0 --json found.json
    python benchmarks/deadlines/deadlines.py pi0 --cameras 3 --side 224 --backend ort-cuda

Deadlines are multiples of the 99th percentile of the smallest budget, under the same load. Each request has a new
random picture, and a request at the smallest budget without a deadline follows it. A chunk of a policy is a request.
`wrong` counts requests that were late by the clock of this script, and reported to be in time.
`measured/expected` has the median, and the 5th and 95th percentile, of the requests that were as long as expected.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from burning import burning
from sinkprune import Pipeline, Policy
from sinkprune.contract.bundle import read_runnable
from sinkprune.contract.checks import WholeNumber
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.progress import OnProgress

QUESTION = "What is in the cup, and what lies on the saucer?"
_CLOCK_MS = 1.0
"""A call returns up to so many milliseconds after the time that its report ends with."""


class Asked(NamedTuple):
    """One request: its milliseconds by the clock of this script, what ran, and its deadline's report."""

    ms: float
    ran: str
    deadline: Any
    """None without a deadline."""
    expected_ms: float | None
    """None without a deadline, and where the request was not as long as expected."""


Ask = Callable[[int, str, float | None], Asked]
"""Sends a request about the picture of a seed, at most at a budget, with or without a deadline in milliseconds."""


def picture(seed: int, side: int) -> Image.Image:
    """Return a random picture of `side` pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


def answers(pipeline: Pipeline, side: int, tokens: int) -> Ask:
    """Return requests for answers of `tokens` tokens. Measures their costs."""
    pipeline.warm_up(picture(0, side), QUESTION)
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}

    def ask(seed: int, budget: str, deadline_ms: float | None) -> Asked:
        shown, began = picture(seed, side), time.perf_counter()
        answer = pipeline.generate(shown, QUESTION, budget=budget, deadline_ms=deadline_ms, **lengths)
        ms, report = (time.perf_counter() - began) * 1e3, answer.deadline
        as_long = report is not None and report.expected_tokens == len(answer.token_ids)
        return Asked(ms, answer.budget, report, report.predicted_ms if report and as_long else None)

    return ask


def chunks(policy: Policy, side: int, cameras: int) -> Ask:
    """Return requests for chunks, from `cameras` frames of `side` pixels. Measures their costs."""
    state = [0.0] * len(policy.facts.usual_state)

    def frames(seed: int) -> list[Image.Image]:
        return [picture(seed * cameras + camera, side) for camera in range(cameras)]

    policy.warm_up(frames(0), QUESTION, state)

    def act(seed: int, budget: str, deadline_ms: float | None) -> Asked:
        shown, began = frames(seed), time.perf_counter()
        chunk = policy.act(shown, QUESTION, state, budget=budget, deadline_ms=deadline_ms, seed=seed)
        ms, report = (time.perf_counter() - began) * 1e3, chunk.deadline
        return Asked(ms, f"{chunk.budget} x {chunk.steps}", report, report.expected_ms if report else None)

    return act


def measure(
    ask: Ask, smallest: str, factors: Sequence[float], requests: int, progress: OnProgress
) -> list[dict[str, Any]]:
    """Return a row for each factor. `smallest` is the smallest budget."""
    alone = [ask(seed, smallest, None).ms for seed in range(requests)]
    quantile, rows = float(np.quantile(alone, 0.99)), []
    for turn, factor in enumerate(factors):
        deadline, found, others = factor * quantile, list[Asked](), list[float]()
        for seed in range(requests):
            progress("asking", turn * requests + seed, len(factors) * requests, "requests")
            found.append(ask(seed, "none", deadline))
            others.append(ask(seed, smallest, None).ms)
        ratios = [asked.ms / asked.expected_ms for asked in found if asked.expected_ms]
        rows.append(
            {
                "deadline_ms": deadline,
                "requests": requests,
                "met": float(np.mean([asked.deadline.met for asked in found])),
                "met_by_smallest": float(np.mean([ms <= deadline for ms in others])),
                "wrong": sum(asked.deadline.met and asked.ms > deadline + _CLOCK_MS for asked in found),
                "measured_over_expected": np.quantile(ratios, (0.5, 0.05, 0.95)).tolist() if ratios else None,
                "ran": dict(Counter(asked.ran for asked in found).most_common()),
            }
        )
    return rows


def in_words(load: str, row: dict[str, Any]) -> str:
    """Return one line of the table."""
    ratio = (
        "{:.2f} ({:.2f} to {:.2f})".format(*row["measured_over_expected"]) if row["measured_over_expected"] else "-"
    )
    ran = ", ".join(f"{count} {name}" for name, count in row["ran"].items())
    met, alone = row["met"], row["met_by_smallest"]
    return f"| {load} | {row['deadline_ms']:.0f} | {met:.1%} | {alone:.1%} | {row['wrong']} | {ratio} | {ran} |\n"


def _load(text: str) -> tuple[int, float, float]:
    processes, on, off = text.split(",")
    return int(processes), float(on), float(off)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--side", type=int, default=336, help="of a picture, in pixels")
    parser.add_argument("--cameras", type=int, default=1, help="frames of a policy's chunk")
    parser.add_argument("--new-tokens", type=int, default=4, help="of an answer")
    parser.add_argument("--requests", type=WholeNumber("--requests", 1, 10**6), default=200)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.2, 1.6], help="the deadlines' multiples")
    parser.add_argument(
        "--load",
        type=_load,
        nargs="*",
        default=[],
        metavar="N,ON,OFF",
        help="N busy processes, by seconds on and off",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json), [])
    bundle = read_runnable(options.bundle)
    loaded: Pipeline | Policy
    if bundle.manifest.policy is None:
        loaded = Pipeline.load(bundle, backend=options.backend)
        ask = answers(loaded, options.side, options.new_tokens)
    else:
        loaded = Policy.load(bundle, backend=options.backend)
        ask = chunks(loaded, options.side, options.cameras)
    smallest = list(bundle.manifest.budgets)[-1]
    loads: dict[str, Callable[[], AbstractContextManager[None]]] = {"none": nullcontext}
    loads |= {f"{load[0]} x {load[1]:g} s on, {load[2]:g} s off": partial(burning, *load) for load in options.load}
    found = {}
    sys.stdout.write(f"{loaded.backend.machine}; smallest budget {smallest}\n")
    sys.stdout.write("| load | deadline ms | met | met by the smallest | wrong | measured/expected | ran |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for name, load in loads.items():
        with status("asking") as progress, load():
            found[name] = measure(ask, smallest, options.factors, options.requests, progress)
        sys.stdout.writelines(in_words(name, row) for row in found[name])
    write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
