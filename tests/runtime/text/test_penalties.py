"""Penalties of repeated tokens, against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from sinkprune import Clip, Pipeline
from sinkprune.runtime.text.penalties import Penalties
from support.models.clips import VIDEO_BUDGETS, frames
from support.programs.commands import run
from support.references.picture_prompts import clip_inputs, reference_inputs
from support.references.steps import QUESTION

Models, Folders, Pipelines = Callable[[str], Any], Callable[[str], Path], Callable[..., Pipeline]

OPTIONS = {"max_new_tokens": 24, "min_new_tokens": 24}


def greedy(model: Any, inputs: dict[str, Any], **settings: object) -> list[int]:
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=False, **OPTIONS, **settings)
    new: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return new


@pytest.fixture
def penalised(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The tokens of prompts that penalties get. A small model rarely generates the tokens of pictures."""
    found = list[set[int]]()

    class Recorded(Penalties):
        def __init__(self, repetition: float, presence: float, frequency: float, prompt: Iterable[int]) -> None:
            found.append({*prompt})
            super().__init__(repetition, presence, frequency, found[-1])

    monkeypatch.setattr("sinkprune.runtime.text.penalties.Penalties", Recorded)
    return found


CASES = [("gqa-112", 1.05, False), ("next", 1.5, False), ("qwen", 0.5, False), ("qwen3-vl", 1.05, False)]


# The token of clips is another than that of images.
@pytest.mark.parametrize(("name", "penalty", "is_clip"), [*CASES, ("qwen", 1.3, True)])
def test_answers_equal_transformers(
    name: str,
    penalty: float,
    is_clip: bool,
    model: Models,
    checkpoint: Folders,
    pipeline: Pipelines,
    photo: Image.Image,
    penalised: list[set[int]],
) -> None:
    if is_clip:
        pipe, clip = pipeline(name, "fp32", VIDEO_BUDGETS, max_frames=8), Clip(frames(8, (170, 140), photo), 2)
        inputs = clip_inputs(model(name), pipe, checkpoint(name), pipe.family.sample_frames(clip), 2)
    else:
        pipe, inputs = pipeline(name), reference_inputs(name, checkpoint(name), [photo], QUESTION)
    answer = pipe.generate(clip if is_clip else photo, QUESTION, repetition_penalty=penalty, **OPTIONS)
    assert answer.token_ids == greedy(model(name), inputs, repetition_penalty=penalty)
    assert penalised[-1] == {*inputs["input_ids"].flatten().tolist()}


def test_the_checkpoint_s_own_penalty_is_applied_unless_a_request_has_one(
    checkpoint: Folders, photo: Image.Image, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint("gqa-112"), folder)
    settings = {**json.loads((folder / "generation_config.json").read_text()), "repetition_penalty": 1.4}
    sampled = {"do_sample": True, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(settings | sampled))
    options = ("-o", tmp_path / "bundle", "--budgets", "retain-64", "--json", tmp_path / "out.json")
    outcome = run("sinkprune-export", folder, *options)
    assert outcome.code == 0 and outcome.stderr.startswith("not applied: do_sample true, temperature 0.5 of the ch")
    summary = json.loads((tmp_path / "out.json").read_text())
    assert (summary["repetition_penalty"], summary["unused_settings"]) == (1.4, sampled)
    pipe = Pipeline.load(tmp_path / "bundle")
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = reference_inputs("gqa-112", folder, [photo], QUESTION)
    own = greedy(model, inputs)
    assert pipe.generate(photo, QUESTION, **OPTIONS).token_ids == own
    without = pipe.generate(photo, QUESTION, repetition_penalty=1, **OPTIONS).token_ids
    assert without == greedy(model, inputs, repetition_penalty=1.0) != own
