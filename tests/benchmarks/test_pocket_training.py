"""The training resumes where it stopped, packs questions without leaking, and writes a checkpoint that exports."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from pocket_training import model as pocket_model
from pocket_training.batches import pictures, turns
from pocket_training.decoding import Sight, answer_loss, read, right_turns
from pocket_training.lessons import draw_questions
from pocket_training.losses import tower_states
from pocket_training.recipes import RECIPES
from pocket_training.stages import Stage
from sinkprune.demo.questions import KINDS
from sinkprune.demo.scenes import Scene, make_scene
from train_pocket_model import Training

RECIPE = RECIPES["llava"]
STAGES = (
    Stage("vision", 1, 2, (1e-3, 1e-3)),
    Stage("sparse", 1, 2, (1e-3, 5e-4), questions=3, visual_tokens=40),
    Stage("whole", 1, 2, (5e-4, 0.0), questions=3),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return pocket_model.new_tokenizer(scenes=60)


@pytest.fixture(scope="module")
def model() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    return pocket_model.new_model()


def sight(model: LlavaForConditionalGeneration, picture: Image.Image, scene: Scene) -> Sight:
    return RECIPE.see(model, RECIPE.new_probe(model), [(scene, picture)], 256, 0).sight


def parameters(training: Training) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])


@pytest.mark.slow
def test_a_resumed_training_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    unbroken = Training(tmp_path / "unbroken.pt", RECIPE)
    started = parameters(unbroken)
    unbroken.run(STAGES)
    Training(tmp_path / "broken.pt", RECIPE).run(STAGES[:2])
    resumed = Training(tmp_path / "broken.pt", RECIPE)
    assert resumed.step == 2
    resumed.run(STAGES)
    assert resumed.step == 3
    # Threads add in any order, and Adam's first steps make a whole step of a gradient's last bit.
    astray = torch.linalg.norm(parameters(resumed) - parameters(unbroken))
    assert astray < 0.05 * torch.linalg.norm(parameters(unbroken) - started)
    assert resumed.tokenizer.to_str() == unbroken.tokenizer.to_str()
    names = dict(unbroken.model.named_parameters())
    before = dict(Training(tmp_path / "fresh.pt", RECIPE).model.named_parameters())
    # Nothing reads the tower's own output norm: LLaVA takes hidden states.
    assert all(("post_layernorm" in name) == torch.equal(before[name], names[name]) for name in names)


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
