"""Measures a second question about a picture: in a session, and as a whole request.

    python benchmarks/sessions/sessions.py demo-output/bundle
    python benchmarks/sessions/sessions.py bundle --backend openvino --budget retain-64 --rounds 9 --json times.json

Every round has a new random picture, and asks in turn: a first question in a session, a second one in the session,
and the second one without a session. The table has medians and ranges of TTFT, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sinkprune import Pipeline, Session
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.files.output_files import check_outputs

QUESTIONS = "What colour is the circle?", "How many red objects are there?"


def measure(pipeline: Pipeline, questions: Sequence[str], budget: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of TTFT of each round; a round before them does not count."""
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"first, in a session": [], "second, in the session": [], "second, alone": []}
    with status("asking") as progress:
        for number in range(rounds + 1):
            progress("asking", number, rounds + 1, "rounds")
            picture = Image.fromarray(rng.integers(0, 256, (480, 640, 3), dtype=np.uint8))
            session, (first, second) = Session(pipeline), questions
            asked = ((session, first), (session, second), (pipeline, second))
            for (answering, question), times in zip(asked, found.values(), strict=True):
                answer = answering.generate(picture, question, budget=budget, max_new_tokens=1)
                times.append(answer.ms["ttft"] or 0.0)
    return {name: times[1:] for name, times in found.items()}


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--questions", nargs=2, default=QUESTIONS, metavar=("FIRST", "SECOND"))
    parser.add_argument("--budget", default="retain-64")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json), [])
    pipeline = Pipeline.load(options.bundle, backend=options.backend, threads=options.threads)
    pipeline.load_plans("sinkpruner")
    found = measure(pipeline, options.questions, options.budget, options.rounds)
    alone = found["second, alone"]
    for name, times in found.items():
        ratio = statistics.median(time / whole for time, whole in zip(times, alone, strict=True))
        spread = f"{statistics.median(times):8.1f} ms ({min(times):.1f} to {max(times):.1f})"
        sys.stdout.write(f"{name:24} {spread}, {ratio:.2f} of alone\n")
    write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
