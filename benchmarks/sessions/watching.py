"""Measures a watch on the pocket model: how often it is right, and the time of a frame.

    python benchmarks/sessions/watching.py demo-output/bundle
    python benchmarks/sessions/watching.py demo-output/bundle --budget retain-64 --capacity 128 --json watch.json

Each question is asked about its scene alone, about a camera that shows the scene for four frames, and about a camera
that showed another scene for two frames before. Frames have a little noise. Scenes are those of the validation set.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sinkprune import Pipeline, WatchSettings
from sinkprune.calibration.evaluation.sample_size import accuracy_warnings, mean_warnings
from sinkprune.contract.checks.ranges import WholeNumber
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.json_output import json_outputs, write_json
from sinkprune.contract.command_line.progress_lines import status
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.reports.progress import OnProgress, unreported
from sinkprune.demo.scene_questions import questions_about

NOISE = 3.0
"""The standard deviation of a frame's noise, of 255."""


def measure(
    pipeline: Pipeline, budget: str, settings: WatchSettings, scenes: int, progress: OnProgress = unreported
) -> dict[str, dict[str, float]]:
    """Return, by what the camera shows: the share of right answers, median milliseconds, and median visual rows."""
    rng = np.random.default_rng(0)

    def frame(scene: Image.Image) -> Image.Image:
        noise = rng.normal(0, NOISE, (scene.height, scene.width, 3))
        return Image.fromarray((np.asarray(scene) + noise).clip(0, 255).astype(np.uint8))

    asked = [*questions_about("validation", scenes)]
    pictures = [*{id(picture): picture for picture, _ in asked}.values()]
    right, times, rows = defaultdict[str, list[bool]](list), defaultdict[str, list[float]](list), {}
    for done, (scene, question) in enumerate(asked):
        progress("asking", done, len(asked), "questions")
        other = pictures[(pictures.index(scene) + 1) % len(pictures)]
        alone = pipeline.generate(frame(scene), question.prompt, budget=budget, max_new_tokens=8)
        right["alone"].append(question.is_right(alone.text))
        times["alone"].append(alone.ms["ttft"] or 0.0)
        rows["alone"] = alone.tokens_per_layer[0]
        for name, shown in (("four frames", [scene] * 4), ("another scene before", [other, other, scene])):
            camera = map(frame, shown)
            answers = pipeline.watch(camera, question.prompt, settings=settings, budget=budget, max_new_tokens=8)
            *_, last = answers
            right[name].append(question.is_right(last.text))
            times[name].append(last.ms["ttft"] or 0.0)
            rows[name] = last.tokens_per_layer[0]
    return {
        name: {
            "questions": len(found),
            "right": sum(found) / len(found),
            "ttft_ms": statistics.median(times[name]),
            "rows": rows[name],
        }
        for name, found in right.items()
    }


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--budget", default="retain-64")
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--scenes", type=WholeNumber("--scenes", 1, 10**6), default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json), [])
    pipeline = Pipeline.load(options.bundle, backend=options.backend)
    settings = WatchSettings(capacity=options.capacity)
    with status("asking") as progress:
        found = measure(pipeline, options.budget, settings, options.scenes, progress)
    for name, figures in found.items():
        sys.stdout.write(
            f"{name:24} {figures['right']:7.1%} of {figures['questions']} right, "
            f"TTFT {figures['ttft_ms']:6.1f} ms, {figures['rows']} rows in the last\n"
        )
    questions = int(found["alone"]["questions"])
    sys.stdout.writelines(f"{line}\n" for line in (*accuracy_warnings(questions), *mean_warnings(options.scenes)))
    write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
