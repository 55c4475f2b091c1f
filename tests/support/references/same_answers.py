"""Whether two backends keep the same tokens and give the same answers."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from sinkprune import ActionReport, Pipeline
from sinkprune.runtime.steps.answer import Answer
from support.references.steps import watched

QUESTION = "What is on the table?"
NEW_TOKENS = 4


def asked(pipeline: Pipeline, photo: Image.Image, **options: object) -> tuple[Answer, list[np.ndarray]]:
    """The answer, and the logits of its tokens."""
    given = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, **options}
    steps = watched(pipeline, photo, QUESTION, **given)
    return steps.answer, [np.array(logits, np.float32) for logits in steps.logits]


def kept_sets(answer: Answer | ActionReport) -> list[list[Any]]:
    """What the sanitizer and each stage kept of each picture, in lists as JSON has them."""
    return [
        [kept.index.tolist(), [[layer, rows.tolist()] for layer, rows in sorted(kept.after_stage.items())]]
        for kept in answer.images
    ]


def assert_equal(
    ours: Pipeline, theirs: Pipeline, photo: Image.Image, *, tolerance: float = 1e-3, **options: object
) -> None:
    """The same kept sets, tokens and counts; the same norms, salience and logits but for the last digits."""
    (answer, logits), (expected, expected_logits) = (asked(pipe, photo, **options) for pipe in (ours, theirs))
    assert kept_sets(answer) == kept_sets(expected)
    assert (answer.token_ids, answer.tokens_per_layer) == (expected.token_ids, expected.tokens_per_layer)
    np.testing.assert_allclose(answer.kept.norms, expected.kept.norms, rtol=1e-4)
    np.testing.assert_allclose(answer.kept.salience, expected.kept.salience, rtol=1e-3, atol=1e-6)
    for own, other in zip(logits, expected_logits, strict=True):
        assert np.abs(own - other).max() < tolerance * np.abs(other).max()


def assert_equal_at_both_ends(ours: Pipeline, theirs: Pipeline, photo: Image.Image) -> None:
    """`assert_equal`, unpruned and at the smallest budget."""
    for budget in ("none", list(theirs.bundle.manifest.budgets)[-1]):
        assert_equal(ours, theirs, photo, budget=budget)


def assert_alike(fast: Pipeline, exact: Pipeline, photo: Image.Image) -> None:
    """As many tokens kept, most of them the same, and norms and logits nearby: what 16 bits may change."""
    for budget in ("none", "retain-64"):
        (answer, logits), (expected, expected_logits) = (asked(pipe, photo, budget=budget) for pipe in (fast, exact))
        assert answer.tokens_per_layer == expected.tokens_per_layer
        np.testing.assert_allclose(answer.kept.norms, expected.kept.norms, rtol=0.05)
        # A processor with bf16 and VNNI kept 11 of 15 tokens of a small int4 tower.
        lost = 1 - len(np.intersect1d(answer.kept.index, expected.kept.index)) / expected.kept.index.size
        assert lost < 1 / 3
        limit = 0.3 if lost else 0.2
        assert np.abs(logits[0] - expected_logits[0]).max() < limit * np.abs(expected_logits[0]).max()


def options_of(form: str) -> tuple[str, str | None]:
    """The precision and weights of a bundle that is called `form`: fp16 is of that precision, all else of fp32."""
    return ("fp16", None) if form == "fp16" else ("fp32", None if form == "fp32" else form)
