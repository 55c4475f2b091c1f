"""The tuning that makes outliers starts from the demo's weights, resumes, and rewards what it should."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration

from pocket_training.batches import pictures, turns
from pocket_training.decoding import read, right_turns
from pocket_training.outliers import NORM, OUTLIERS, OutlierProbe, norm_loss, outliers
from pocket_training.recipes import POCKET, RECIPES
from pocket_training.stages import Stage
from sinkprune.demo.questions import KINDS
from sinkprune.demo.scenes import make_scene
from train_pocket_model import Training

RECIPE = RECIPES["llava-outliers"]
MOST = 1.6


@given(
    arrays(np.float32, (2, 9), elements=st.sampled_from([0.0, 0.5, 1.0, 1.5, 1.7, 4.0, 5.0, 6.0])),
    arrays(np.bool_, (2, 9), elements=st.booleans()),
)
def test_the_norm_loss_is_that_of_the_rule(norms: np.ndarray, background: np.ndarray) -> None:
    below, above = [], 0.0
    chosen = outliers(torch.from_numpy(norms), torch.from_numpy(background))
    for row, picks in enumerate(chosen.tolist()):
        open_to = sorted(np.where(background[row], norms[row], 0.0), reverse=True)
        assert (
            sorted((norms[row, i] if background[row, i] else 0.0 for i in picks), reverse=True) == open_to[:OUTLIERS]
        )
        below += [max(0.0, NORM - norms[row, i]) ** 2 for i in picks]
        above += sum(max(0.0, norms[row, i] - MOST) ** 2 for i in range(9) if i not in picks)
    expected = sum(below) / len(below) + above / 2
    assert norm_loss(torch.from_numpy(norms), chosen).item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_tuning_starts_from_the_demo_and_resumes(tmp_path: Path) -> None:
    drawn = make_scene("validation", 0)
    seen = pictures([drawn])
    saved = LlavaForConditionalGeneration.from_pretrained(POCKET, dtype=torch.float32)
    training = Training(tmp_path / "state.pt", RECIPE)
    assert isinstance(training.probe, OutlierProbe)
    assert training.tokenizer.to_str() == Tokenizer.from_file(str(POCKET / "tokenizer.json")).to_str()
    with torch.no_grad():
        features = saved.get_image_features(seen.pixels).pooler_output[0]
        sight = RECIPE.see(training.model, training.probe, [drawn], 256, 0).sight
        assert torch.allclose(sight.tokens[0], features, atol=1e-3)
        questions = RECIPE.ask(drawn[0], Random(0), 8, ("existence-random", "colour", "shape"))
        asked = turns([questions], training.tokenizer, RECIPE.dialogue)
        assert all(right_turns(read(training.model, sight, asked), asked)[0])

    stages = [Stage("outliers", 2, 1, (1e-4, 1e-4), 2, kinds=tuple(KINDS))]
    training.run(stages[:1])
    resumed = Training(tmp_path / "state.pt", RECIPE)
    assert resumed.step == 2
    parameters = zip(resumed.model.parameters(), training.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in parameters)
    assert any(not torch.equal(value, saved.state_dict()[name]) for name, value in resumed.model.state_dict().items())
