"""Which heads look elsewhere for another question: by a slow reference, and by transformers' own attentions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from sinkprune import Pipeline, TaskError
from sinkprune.calibration.attention import (
    AttentionObserver,
    _chosen,
    choose_heads,
    question_dependence,
    questions_by_picture,
)
from sinkprune.calibration.tasks import Item
from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.questions import Question
from sinkprune.runtime.media.picture_warnings import PictureFacts, picture_facts
from support.references.picture_prompts import reference_inputs
from support.references.transformers_runs import attentions

Array = np.ndarray[Any, Any]
ASKED = ("What is this?", "Which colour is the cup on the table?", "Is there a dog?")


def slow(attention: Array) -> list[float]:
    """The entropy of the mean distribution less the mean entropy, of each head of [Q,H,V], in nats."""

    def entropy(shares: list[float]) -> float:
        return -sum(share * math.log(share) for share in shares if share > 0)

    found = []
    for head in range(attention.shape[1]):
        rows = [[float(value) for value in question[head]] for question in attention]
        rows = [[v / sum(row) for v in row] if sum(row) > 0 else [1 / len(row)] * len(row) for row in rows]
        mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        found.append(entropy(mean) - sum(map(entropy, rows)) / len(rows))
    return found


def item(picture: str, question: str) -> Item:
    return Item(
        Question(f"{picture} {question}", "all", question, ("a cup",)), picture, lambda: None, PictureFacts((8, 8))
    )  # type: ignore[arg-type, return-value]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(arrays(np.float64, (3, 2, 5), elements=st.sampled_from([0.0, 1e-300, 1e-9, 0.25, 1.0, 0.125])))
def test_it_is_the_divergence_of_the_questions(attention: Array) -> None:
    found = question_dependence(attention)
    np.testing.assert_allclose(found, slow(attention), rtol=1e-9, atol=1e-12)
    assert (found >= 0).all() and (found <= math.log(3) + 1e-12).all()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("a0 a1 b2", [["a0", "a1"], ["b2", "b0"]]),
        ("a0 b1", [["a0", "a1"], ["b1", "b0"]]),
        ("a0 b0 c1", [["a0", "a1"], ["b0", "b1"], ["c1", "c0"]]),
        ("a0 b1 a2", [["a0", "a2"], ["b1", "b2"]]),
        ("a0 a0 b1", [["a0", "a1"], ["b1", "b0"]]),
    ],
)
def test_every_picture_is_asked_at_least_two_questions(lines: str, expected: list[list[str]]) -> None:
    """A letter is a picture, a digit a question."""
    groups = questions_by_picture([item(line[0], line[1]) for line in lines.split()])
    assert [[one.question.text for one in group] for group in groups] == [
        [line[1] for line in group] for group in expected
    ]
    assert [[one.picture for one in group] for group in groups] == [[group[0][0]] * len(group) for group in expected]


@pytest.mark.parametrize("lines", ["a0", "a0 b0 a0"])
def test_the_same_question_throughout_is_refused(lines: str) -> None:
    with pytest.raises(TaskError, match="all questions are the same, expected at least two"):
        questions_by_picture([item(line[0], line[1]) for line in lines.split()])


@pytest.mark.parametrize("name", ["gqa-112", "qwen2-vl"])
def test_heads_are_chosen_by_what_transformers_attends_to(
    name: str,
    checkpoint: Callable[[str], Path],
    bundle: Callable[..., Path],
    model: Callable[[str], Any],
    photo: Image.Image,
) -> None:
    torch_model = model(name)
    pictures = {"a": photo.resize((280, 336)), "b": photo.resize((280, 336)).rotate(180)}
    cuts = prune_layers(torch_model.config.text_config.num_hidden_layers)
    expected = {cut: np.zeros(torch_model.config.text_config.num_attention_heads) for cut in cuts}
    groups = []
    for title, image in pictures.items():
        looks: dict[int, list[Array]] = {cut: [] for cut in cuts}
        for question in ASKED:
            inputs = reference_inputs(name, checkpoint(name), [image], question)
            with attentions(torch_model) as weights, torch.no_grad():
                torch_model(**inputs)
            is_image = inputs["input_ids"][0] == torch_model.config.image_token_id
            visual = torch.nonzero(is_image)[:, 0].tolist()
            for cut in cuts:
                looks[cut].append(weights[cut][:, visual[-1] + 1 :, visual].mean(axis=1))
        for cut, own in looks.items():
            expected[cut] += slow(np.stack(own)) / np.array(len(pictures))
        groups.append([Item(Question(q, "all", q, ("a",)), title, image.copy, picture_facts(image)) for q in ASKED])

    watch, counted = AttentionObserver(), []
    pipeline = Pipeline.load(bundle(name), wrap=watch.wrap, check_sums=False)
    found = choose_heads(pipeline, watch, groups, lambda: counted.append(1))
    assert len(counted) == len(pictures) * len(ASKED)
    assert [*found.layers] == [str(cut) for cut in cuts]
    for cut, values in expected.items():
        own = found.layers[str(cut)]
        np.testing.assert_allclose(own.question_dependence, values, rtol=1e-2, atol=1e-5)
        assert list(own.chosen) == np.flatnonzero(values >= values.max() / 2).tolist()
    assert found.of(pipeline.bundle.manifest.language_model)


def test_a_layer_whose_heads_hardly_read_the_question_has_none() -> None:
    total = {"2": np.array([0.1, 3.0, 1.4, 1.5]), "5": np.array([0.29, 0.2]), "11": np.array([0.2, 0.31])}
    found = _chosen(total, 10)
    assert {layer: own.chosen for layer, own in found.items()} == {"2": (1, 3), "5": (), "11": (1,)}
    np.testing.assert_allclose(found["5"].question_dependence, [0.029, 0.02])
