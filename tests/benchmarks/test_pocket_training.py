"""The training of the pocket LLaVA and of its tower with outliers resumes, and leaks nothing between questions."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from pocket_training import model as pocket_model
from pocket_training.batches import pictures, turns
from pocket_training.decoding import Sight, answer_loss, read, right_turns
from pocket_training.lessons import draw_questions
from pocket_training.losses import tower_states
from pocket_training.outliers import NORM, OUTLIERS, OutlierProbe, norm_loss, outliers
from pocket_training.recipes import POCKET, RECIPES
from pocket_training.stages import Stage
from sinkprune.demo.questions import KINDS
from sinkprune.demo.scenes import Scene, make_scene
from train_pocket_model import Training

RECIPE = RECIPES["llava"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return pocket_model.new_tokenizer(scenes=60)


@pytest.fixture(scope="module")
def model() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    return pocket_model.new_model()


def sight(model: LlavaForConditionalGeneration, picture: Image.Image, scene: Scene) -> Sight:
    return RECIPE.see(model, RECIPE.new_probe(model), [(scene, picture)], 256, 0).sight


def test_turns_see_the_picture_and_themselves_only(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer
) -> None:
    scene, picture = make_scene("validation", 3)
    tokens = sight(model, picture, scene)
    asked = turns([draw_questions(scene, Random(0), 20, list(KINDS))], tokenizer)
    assert asked.ids.shape[1] > asked.chunk
    reading = read(model, tokens, asked)
    together = answer_loss(reading, asked)
    alone, answered = torch.zeros(()), 0
    for number in range(1, int(asked.turn.max()) + 1):
        one = asked.turn[0] == number
        parts = (asked.ids[:, one], asked.turn[:, one], asked.place[:, one], asked.targets[:, one])
        turn = type(asked)(asked.before, *parts, int(one.sum()))
        count, own = int((turn.targets >= 0).sum()), read(model, tokens, turn)
        alone, answered = alone + count * answer_loss(own, turn), answered + count
        (right,) = right_turns(own, turn)
        assert right[number - 1] == right_turns(reading, asked)[0][number - 1]
    assert together.item() == pytest.approx(alone.item() / answered, rel=1e-4)


def test_the_checkpoint_has_the_trained_features_and_the_turns_of_the_training(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pocket_model.save(model, tokenizer, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 16e6
    saved = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    seen = pictures([make_scene("validation", 0)])
    with torch.no_grad():
        features = saved.get_image_features(seen.pixels).pooler_output[0]
        trained = model.model.multi_modal_projector(tower_states(model, seen)[:, 1:])[0]
    assert torch.allclose(features, trained, atol=2e-2)
    content = [{"type": "image"}, {"type": "text", "text": "Is there a red star?"}]
    rendered = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )["input_ids"]
    before = tokenizer.encode(pocket_model.DIALOGUE.before).ids
    after = tokenizer.encode(pocket_model.DIALOGUE.after.format("Is there a red star?"), add_special_tokens=False).ids
    assert [*before, pocket_model.IMAGE, *after][-len(rendered) :] == rendered
    assert rendered[-len(after) :] == after


TUNED = RECIPES["llava-outliers"]
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
    training = Training(tmp_path / "state.pt", TUNED)
    assert isinstance(training.probe, OutlierProbe)
    assert training.tokenizer.to_str() == Tokenizer.from_file(str(POCKET / "tokenizer.json")).to_str()
    with torch.no_grad():
        features = saved.get_image_features(seen.pixels).pooler_output[0]
        sight = TUNED.see(training.model, training.probe, [drawn], 256, 0).sight
        assert torch.allclose(sight.tokens[0], features, atol=1e-3)
        questions = TUNED.ask(drawn[0], Random(0), 8, ("existence-random", "colour", "shape"))
        asked = turns([questions], training.tokenizer, TUNED.dialogue)
        assert all(right_turns(read(training.model, sight, asked), asked)[0])

    stages = [Stage("outliers", 2, 1, (1e-4, 1e-4), 2, kinds=tuple(KINDS))]
    training.run(stages[:1])
    resumed = Training(tmp_path / "state.pt", TUNED)
    assert resumed.step == 2
    parameters = zip(resumed.model.parameters(), training.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in parameters)
    assert any(not torch.equal(value, saved.state_dict()[name]) for name, value in resumed.model.state_dict().items())
