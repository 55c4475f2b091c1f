"""Measures answers to a second question whose visual tokens were chosen for the first, against tokens of its own.

    python benchmarks/sessions/follow_ups.py demo-output/bundle
    python benchmarks/sessions/follow_ups.py demo-output/bundle --scenes 80 --budgets retain-64 --json follow-ups.json

A cache of pruned rows answers a second question from the tokens that the first question chose. A session selects
anew. Each question about a scene of the test set is asked after the one before it, in both ways. `changed` is the
mean share of the tokens in the last layer that the two ways do not have in common.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sinkprune import Answer, Pipeline
from sinkprune.calibration.evaluation.statistics import accuracy_warnings, mean_warnings
from sinkprune.contract.checks import WholeNumber, counted
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.questions import Question
from sinkprune.demo.questions import questions_about
from sinkprune.runtime.backends import Backend, Engine
from sinkprune.runtime.commands.interrupted import beside_earlier

BUDGETS = "retain-192,retain-128,retain-64,retain-32"


class FrozenSelects:
    """Replaces the selects of a pipeline. While frozen, each keeps the visual tokens that it kept last."""

    def __init__(self) -> None:
        self.frozen = False

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        """Return the engine to run in the place of `engine`, as `Pipeline.load` takes it."""
        return _FrozenSelect(engine, backend, self) if "/select_after_" in graph else engine


class _FrozenSelect:
    """A select that keeps its own choice, or repeats the one before."""

    def __init__(self, engine: Engine, backend: Backend, selects: FrozenSelects) -> None:
        self._engine, self._backend, self._selects = engine, backend, selects
        # The places of the kept tokens among the visual rows.
        self._kept = np.zeros(0, np.int64)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        array, tensor = self._backend.numpy, self._backend.tensor
        visual, text = array(inputs["visual_index"]), array(inputs["text_index"])
        if not self._selects.frozen:
            found = self._engine(inputs)
            self._kept = np.flatnonzero(np.isin(visual, array(found["keep_index"])))
            return found
        rows = array(inputs["hidden"]).shape[1]
        keep = np.union1d(np.setdiff1d(np.arange(rows), visual), visual[self._kept])
        gathered = {f"{name}_out": array(inputs[name])[:, keep] for name in ("hidden", "cos", "sin")}
        places = {
            "visual_index_out": np.searchsorted(keep, visual[self._kept]),
            "text_index_out": np.searchsorted(keep, text),
            "keep_index": keep,
        }
        return {name: tensor(np.ascontiguousarray(rows)) for name, rows in {**gathered, **places}.items()}


class Pair(NamedTuple):
    """The answers to one question in both ways."""

    anew: bool
    """Right from tokens that were selected for it."""
    frozen: bool
    """Right from the tokens of the question before."""
    changed: float
    """The share of the last layer's tokens that the two ways do not have in common."""


def answer_pairs(
    pipeline: Pipeline, selects: FrozenSelects, budget: str, questions: Sequence[tuple[Image.Image, Question]]
) -> Iterator[Pair]:
    """Yield the answers to each question, which is asked after the one before it about its picture."""
    for _, group in groupby(questions, key=lambda pair: id(pair[0])):
        asked = [*group]
        for (picture, question), (_, before) in zip(asked, [asked[-1], *asked], strict=False):
            selects.frozen = False
            own = pipeline.generate(picture, question.prompt, budget=budget, max_new_tokens=8)
            pipeline.generate(picture, before.prompt, budget=budget, max_new_tokens=1)
            selects.frozen = True
            found = pipeline.generate(picture, question.prompt, budget=budget, max_new_tokens=8)
            changed = 1 - len(_last(own) & _last(found)) / len(_last(own))
            yield Pair(question.is_right(own.text), question.is_right(found.text), changed)


def _last(answer: Answer) -> set[int]:
    """Return the tokens that survived the last select."""
    after = answer.images[0].after_stage
    return set(after[max(after)].tolist())


def _figures(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return how many questions were asked, the shares of right answers in both ways, and that of changed tokens."""
    means = {name: float(np.mean([getattr(pair, name) for pair in pairs])) for name in Pair._fields}
    return {"questions": len(pairs), **means}


@dataclass(frozen=True)
class _Options:
    bundle: Path
    backend: str | None
    budgets: str
    scenes: int
    json: Path | None


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--scenes", type=WholeNumber("--scenes", 1, 10**6), default=80)
    parser.add_argument("--json", type=Path)
    options = _Options(**vars(parser.parse_args(arguments)))
    check_outputs(json_outputs(options.json), [])
    selects = FrozenSelects()
    pipeline = Pipeline.load(options.bundle, backend=options.backend, wrap=selects.wrap)
    questions = [*questions_about("test", options.scenes)]
    found, interrupted = dict[str, dict[str, float]](), ""
    for budget in options.budgets.split(","):
        asking, pairs = f"asking with {budget}", list[Pair]()
        try:
            with status(asking) as progress:
                for pair in answer_pairs(pipeline, selects, budget, questions):
                    pairs.append(pair)
                    progress(asking, len(pairs), len(questions), "questions")
        except KeyboardInterrupt:
            interrupted = f"{budget} was asked {len(pairs)} of {counted(len(questions), 'question')}."
        if pairs:
            found[budget] = figures = _figures(pairs)
            sys.stdout.write(
                f"{budget:12} {figures['questions']} questions: selected anew {figures['anew']:.1%} right, "
                f"frozen {figures['frozen']:.1%}; {figures['changed']:.0%} of the last layer's tokens changed\n"
            )
            sys.stdout.flush()
        if interrupted:
            break
    asked = questions[: min((int(figures["questions"]) for figures in found.values()), default=0)]
    if asked:
        pictures = {id(picture) for picture, _ in asked}
        sys.stdout.writelines(f"{line}\n" for line in (*accuracy_warnings(len(asked)), *mean_warnings(len(pictures))))
    if not interrupted:
        write_json(options.json, found)
        return
    earlier = ""
    if found:
        options, earlier = beside_earlier(options, "json")
        write_json(options.json, found)
    raise KeyboardInterrupt(interrupted + earlier)


if __name__ == "__main__":
    sys.exit(main())
