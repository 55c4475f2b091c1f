"""Closed lists of answers: their probabilities are those of token by token, the likeliest is the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sinkprune import Pipeline, Stream
from sinkprune.runtime.hooks import Budgets, Observer
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.decoding import decode_one_token
from support.references.steps import Array, watched

QUESTION = "Which colour is the cup?"
APART = ("red", "the cup", "blue", "the table")
"""Answers of which none begins another. Two have a first token in common."""
WITHIN = ("red", "red cup", "red cup on the table", "blue")


def by_tokens(pipeline: Pipeline, photo: Image.Image, ids: Sequence[int], budget: str) -> list[Array]:
    """Return the log probabilities of what follows the prompt, and each of `ids` after it, token by token."""
    steps = watched(pipeline, photo, QUESTION, budget=budget, max_new_tokens=1)
    logits = [steps.logits[0]]
    for token in ids:
        row = pipeline.embedding([token])[0]
        logits.append(pipeline.backend.numpy(decode_one_token(pipeline.chain, steps.prefill.cache, row))[0])
    return [torch.log_softmax(torch.from_numpy(each).double(), dim=0).numpy() for each in logits]


def expected(pipeline: Pipeline, photo: Image.Image, texts: Sequence[str], budget: str) -> Array:
    """The probability of each text, by the slow way."""
    scores, stops, stop_counts = [], [*pipeline.bundle.manifest.tokens.stop], texts == WITHIN
    for text in texts:
        ids = pipeline.prompts.answer_ids(text)
        after = by_tokens(pipeline, photo, ids, budget)
        score = sum(after[place][token] for place, token in enumerate(ids))
        scores.append(score + (np.log(np.exp(after[-1][stops]).sum()) if stop_counts else 0))
    shares: Array = np.exp(np.array(scores) - max(scores))
    return shares / shares.sum()


@pytest.mark.parametrize("texts", [APART, WITHIN])
@pytest.mark.parametrize(
    ("backend", "name", "budget"),
    [
        ("ort-cpu", "gqa-112", "none"),
        ("ort-cpu", "gqa-112", "retain-64+compact"),
        ("openvino", "gqa-112", "none"),
        ("openvino", "gqa-112", "retain-64"),
        ("ort-cpu", "qwen3-vl", "prune-66.7"),
    ],
)
def test_probabilities_are_those_of_tokens_one_by_one(
    backend: str, name: str, budget: str, texts: Sequence[str], bundle: Callable[..., Path], photo: Image.Image
) -> None:
    budgets = ("retain-64", "retain-64+compact") if name == "gqa-112" else ("prune-66.7",)
    pipeline, small = loaded(bundle(name, "fp32", budgets), backend), photo.resize((120, 90))
    answer = pipeline.generate(small, QUESTION, budget=budget, choice=texts)
    shares = expected(pipeline, small, texts, budget)
    assert tuple(answer.choices) == texts
    np.testing.assert_allclose([*answer.choices.values()], shares, atol=1e-3)
    # As logarithms too, because small shares differ little.
    np.testing.assert_allclose(
        np.log([*answer.choices.values()]), np.log(shares), atol=1e-3 * np.abs(np.log(shares)).max()
    )
    assert answer.text == texts[int(np.argmax(shares))]
    assert answer.confidence == answer.choices[answer.text] == max(answer.choices.values())
    assert math.isclose(sum(answer.choices.values()), 1, rel_tol=1e-9)
    assert (answer.finish, answer.token_ids) == ("stop", pipeline.prompts.answer_ids(answer.text))
    assert answer.ms["per_token"] is None and answer.ms["latency"] > answer.ms["ttft"]  # type: ignore[operator]


@cache
def loaded(path: Path, backend: str) -> Pipeline:
    return Pipeline.load(path, backend=backend, compute="fp32", threads=1)


@pytest.fixture
def pipe(bundle: Callable[..., Path]) -> Pipeline:
    return loaded(bundle("gqa-112", "fp32", ("retain-64", "retain-64+compact")), "ort-cpu")


def asked(pipeline: Pipeline, photo: Image.Image, texts: Sequence[str], **options: Any) -> Answer:
    return pipeline.generate(photo, QUESTION, choice=texts, **options)


def test_neither_order_nor_single_rows_change_scores(
    pipe: Pipeline, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = asked(pipe, photo, APART)
    monkeypatch.setattr(type(pipe.backend), "resumes", False)
    after = asked(pipe, photo, APART[::-1])
    assert after.text == before.text
    np.testing.assert_allclose([after.choices[text] for text in APART], [*before.choices.values()], rtol=1e-3)


def test_temperature_samples_by_probability(pipe: Pipeline, photo: Image.Image) -> None:
    small, texts = photo.resize((60, 40)), ("the cup", "the table")
    shares = asked(pipe, small, texts).choices
    # So that both are drawn, however sure the model is.
    temperature = abs(math.log(shares["the cup"] / shares["the table"]))
    drawn = [asked(pipe, small, texts, temperature=temperature, seed=seed) for seed in range(40)]
    assert {answer.text for answer in drawn} == {*texts}
    assert drawn[3].text == asked(pipe, small, texts, temperature=temperature, seed=3).text
    assert all(math.isclose(answer.choices["the cup"], shares["the cup"], rel_tol=1e-4) for answer in drawn)
    assert all(answer.confidence == answer.choices[answer.text] for answer in drawn)


def test_without_time_first_tokens_decide(
    pipe: Pipeline, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budgets, "finish", lambda policy, tokens: "deadline")
    texts = ("red", "blue")
    assert len({pipe.prompts.answer_ids(text)[0] for text in texts}) == 1
    for order in (texts, texts[::-1]):
        answer = asked(pipe, photo, order)
        assert (answer.text, answer.finish, answer.confidence) == (order[0], "deadline", 0.5)


class Passes(Observer):
    """Counts passes."""

    count = 0

    def during(self, part: str) -> AbstractContextManager[Any]:
        self.count += part == "decode"
        return nullcontext()


@pytest.mark.parametrize("resumes", [True, False])
def test_each_pass_is_a_step_that_a_cancel_ends(
    resumes: bool, pipe: Pipeline, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(pipe.backend), "resumes", resumes)
    whole, seen = asked(pipe, photo, WITHIN), Passes()
    stream = pipe.stream(photo, QUESTION, choice=WITHIN, observer=seen)
    counts = list[int]()
    # Preparing it is a step too.
    assert stream.step() is None
    while not (text := stream.step()):
        assert text is None
        counts.append(seen.count)
        time.sleep(0.1)
    # Without `resumes`, each row is a pass.
    assert counts == [*range(seen.count)] and len(counts) >= 2
    assert next(stream, None) is None and stream.answer.choices == whole.choices
    # Without the time of others.
    assert stream.answer.ms["latency"] < 100 * len(counts)  # type: ignore[operator]

    for steps, passes, end in ((3, 1, Stream.cancel), (2, 0, Stream.close)):
        seen = Passes()
        stream = pipe.stream(photo, QUESTION, choice=WITHIN, observer=seen)
        assert ([stream.step() for _ in range(steps)], seen.count) == ([None] * steps, passes)
        end(stream)
        if end is Stream.cancel:
            assert stream.rest().finish == "cancelled"
        assert seen.count == passes


def test_a_deadline_counts_the_passes(pipe: Pipeline, photo: Image.Image) -> None:
    texts = ("red", "red cup", "blue")
    pipe.warm_up(photo, QUESTION, seconds=0.1, choice=texts)
    report = asked(pipe, photo, texts, deadline_ms=60_000).deadline
    assert report is not None and report.met
    # A pass for "red cup" and one for "blue", after the prompt's.
    assert report.expected_tokens == 3
