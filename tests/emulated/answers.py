"""Answers about scenes: `python answers.py FOLDER` writes those of this processor, pytest compares another one's.

The folder holds a bundle `pocket`, and `scenes` that `sinkprune.demo.write_scenes` made. Each backend here answers in
fp32, unpruned and at retain-64. Every token and every kept set must be equal.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sinkprune import Pipeline
from sinkprune.runtime.steps.answer import Answer

BUDGETS = ("none", "retain-64")
BACKENDS = {"ort-cpu": ("onnxruntime", 3), "openvino": ("openvino", 1)}
"""Each with the library that it needs, and how many pictures it is asked about. An emulated answer takes a minute."""
KINDS = ("colour", "counting", "reading")
"""One question of each kind is put to each scene, in turn."""
FILE = "answers.json"


def questions(scenes: Path) -> list[dict[str, str]]:
    """One line of `scenes.jsonl` for each picture."""
    lines = [json.loads(line) for line in (scenes / "scenes.jsonl").read_text(encoding="utf-8").splitlines()]
    pictures = sorted({line["image"] for line in lines})
    return [
        next(line for line in lines if line["image"] == picture and line["kind"] == KINDS[number % len(KINDS)])
        for number, picture in enumerate(pictures)
    ]


def facts(answer: Answer) -> dict[str, Any]:
    """What must not depend on the processor."""
    stages = {str(layer): rows.tolist() for layer, rows in sorted(answer.kept.after_stage.items())}
    return {
        "text": answer.text,
        "tokens": list(map(int, answer.token_ids)),
        "tokens per layer": list(answer.tokens_per_layer),
        "kept by the sanitizer": answer.kept.index.ravel().tolist(),
        "kept after stages": stages,
    }


def answers(folder: Path, backend: str) -> dict[str, dict[str, Any]]:
    """The facts of each answer, by budget and picture."""
    pipeline, scenes = Pipeline.load(folder / "pocket", backend=backend, compute="fp32"), folder / "scenes"
    return {
        f"{budget}, {line['image']}": facts(
            pipeline.generate(scenes / line["image"], line["question"], budget=budget, max_new_tokens=8)
        )
        for line in questions(scenes)[: BACKENDS[backend][1]]
        for budget in BUDGETS
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_those_of_the_machine_that_wrote_them(backend: str) -> None:
    folder = Path(os.environ["HANDED_OVER"]).parent
    expected = json.loads((folder / FILE).read_text(encoding="utf-8"))
    assert backend in expected, "not installed where the answers were written"
    assert answers(folder, backend) == expected[backend]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    written = {backend: answers(folder, backend) for backend, (library, _) in BACKENDS.items() if find_spec(library)}
    (folder / FILE).write_text(json.dumps(written), encoding="utf-8")
