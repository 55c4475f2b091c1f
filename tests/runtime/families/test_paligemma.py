"""PaliGemma: a prompt whose rows see each other in both directions, and an answer that is causal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from sinkprune import Pipeline
from sinkprune.contract.errors import PromptError, UsageError
from sinkprune.serving.sessions import Session
from support.references.picture_prompts import reference_inputs
from support.references.steps import QUESTION
from support.references.transformers_runs import assert_equals_transformers

Models, Folders, Pipelines = Callable[[str], Any], Callable[[str], Path], Callable[..., Pipeline]


def test_two_pictures_in_the_other_dialect(
    model: Models, checkpoint: Folders, pipeline: Pipelines, photo: Image.Image
) -> None:
    images = [photo.resize((224, 160)), photo.rotate(90).resize((90, 300))]
    pipe = pipeline("paligemma", budgets=("prune-80",), dialect="opset20", max_images=2)
    inputs = reference_inputs("paligemma", checkpoint("paligemma"), images, QUESTION)
    assert_equals_transformers(model("paligemma"), inputs, pipe, images, QUESTION, 8)
    pruned = pipe.generate(images, QUESTION, budget="prune-80", max_new_tokens=2)
    assert pruned.tokens_per_layer == [58, 22, 22, 22, 22, 22]


def test_nothing_is_shared_between_questions_and_tokens_of_choices_run_one_by_one(
    pipeline: Pipelines, photo: Image.Image, model: Models, checkpoint: Folders
) -> None:
    loaded, texts = pipeline("paligemma", budgets=("prune-80",)), ("red cup", "blue", "red")
    with pytest.raises(UsageError, match=r"paligemma.* all rows of a prompt see its question"):
        Session(loaded)
    with pytest.raises(PromptError, match="one question"):
        loaded.generate(photo, QUESTION, history=[("user", "What is this?"), ("assistant", "A cup.")])
    answer = loaded.generate(photo, QUESTION, budget="none", choice=texts)
    inputs = reference_inputs("paligemma", checkpoint("paligemma"), [photo], QUESTION)
    tokenizer, scores = AutoTokenizer.from_pretrained(checkpoint("paligemma")), []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text, add_special_tokens=False)["input_ids"], 1]])
        given = {key: inputs[key] for key in ("pixel_values",)}
        whole = torch.cat([inputs["input_ids"], ids], dim=1)
        kinds = torch.cat([torch.zeros_like(inputs["input_ids"]), torch.ones_like(ids)], dim=1)
        with torch.no_grad():
            logits = model("paligemma")(input_ids=whole, token_type_ids=kinds, **given).logits[0]
        places = torch.arange(len(ids[0])) + len(inputs["input_ids"][0]) - 1
        scores.append(logits.log_softmax(-1)[places, ids[0]].sum().item())
    expected = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose([answer.choices[text] for text in texts], expected, rtol=1e-3)
