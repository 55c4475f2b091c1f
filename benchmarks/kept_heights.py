"""Measures where in a picture kept tokens lie: stages may prefer tokens near the question, those at the foot.

    python benchmarks/kept_heights.py demo-output/bundle
    python benchmarks/kept_heights.py bundle --budgets retain-64,retain-32 --method sinkpruner --questions 187

The height of a token is 0 at the top of the picture and 1 at the foot. The table has the mean over the kept tokens of
each question, then over questions, with its standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sinkprune import Answer, Pipeline
from sinkprune.calibration.tasks import load_task
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.progress import progress_bar
from sinkprune.runtime.commands.options import name_list


def heights(answer: Answer) -> list[float]:
    """Return the mean height of the tokens that the sanitizer keeps, and of those that each stage leaves."""
    kept = answer.kept
    middle = (kept.layout.boxes[:, 1] + kept.layout.boxes[:, 3]) / 2 / kept.layout.size[1]
    rows = middle[kept.index.ravel()]
    return [float(rows.mean()), *(float(rows[left].mean()) for left in kept.after_stage.values())]


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--budgets", type=name_list, default=["retain-64", "retain-32"])
    parser.add_argument("--method", default="sinkpruner")
    parser.add_argument("--questions", type=int, default=187)
    options = parser.parse_args(arguments)
    pipeline, items = Pipeline.load(options.bundle), load_task("scenes", None)
    # Evenly from all pictures.
    items = items[:: max(1, len(items) // options.questions)][: options.questions]
    for budget in options.budgets:
        asked = {"budget": budget, "method": options.method, "max_new_tokens": 1}
        rows = list[list[float]]()
        with progress_bar(f"asking with {budget}", len(items), "questions") as count:
            for item in items:
                rows.append(heights(pipeline.generate(item.load_image(), item.question.prompt, **asked)))
                count()
        found = np.array(rows)
        errors = found.std(axis=0) / len(found) ** 0.5
        columns = (f"{mean:.3f} ±{error:.3f}" for mean, error in zip(found.mean(axis=0), errors, strict=True))
        sys.stdout.write(f"{budget:<12} {'  '.join(columns)}\n")


if __name__ == "__main__":
    sys.exit(main())
