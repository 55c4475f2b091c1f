"""Answer questions about scenes: `python answers.py BUNDLE SCENES write|compare FILE`.

SCENES is a folder that `sinkprune.demo.write_scenes` made. Each backend that is installed answers, in fp32, unpruned
and at retain-64. `compare` exits with 1 if tokens or kept sets differ from those in FILE.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sinkprune import Pipeline
from sinkprune.runtime.steps.answer import Answer

BUDGETS = ("none", "retain-64")
BACKENDS = {"ort-cpu": ("onnxruntime", 3), "openvino": ("openvino", 1)}
"""Each with the library that it needs, and how many pictures it is asked about. An emulated answer takes a minute."""
KINDS = ("colour", "counting", "reading")
"""One question of each kind is put to each scene, in turn."""


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


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


def answers(bundle: Path, scenes: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The facts of each answer with the backend, budget and picture."""
    for backend, (library, number) in BACKENDS.items():
        if find_spec(library) is None:
            report(f"{backend}: not installed")
            continue
        started = time.monotonic()
        pipeline = Pipeline.load(bundle, backend=backend, compute="fp32")
        report(f"{backend}: loaded in {time.monotonic() - started:.1f} s")
        for line in questions(scenes)[:number]:
            for budget in BUDGETS:
                answer = pipeline.generate(scenes / line["image"], line["question"], budget=budget, max_new_tokens=8)
                key = f"{backend}, {budget}, {line['image']}"
                seconds = (answer.ms["latency"] or 0.0) / 1000
                report(f"{key}: '{answer.text}' in {seconds:.1f} s, expected '{line['answer']}'")
                yield key, facts(answer)


def differs(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Report each fact of an answer that differs."""
    wrong = [fact for fact in expected if found[fact] != expected[fact]]
    for fact in wrong:
        report(f"error: {fact}: expected {expected[fact]}, found {found[fact]}")
    return bool(wrong)


def main(bundle: Path, scenes: Path, action: str, file: Path) -> int:
    report(f"processor: {platform.machine()}, Python {platform.python_version()}")
    if action == "write":
        file.write_text(json.dumps(dict(answers(bundle, scenes))), encoding="utf-8")
        return 0
    expected = json.loads(file.read_text(encoding="utf-8"))
    results = [differs(found, expected.pop(key)) for key, found in answers(bundle, scenes)]
    for key in expected:
        report(f"error: no answer: {key}")
    report(f"{results.count(False)} of {len(results) + len(expected)} answers have the same tokens and kept sets")
    return 1 if any(results) or expected else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
