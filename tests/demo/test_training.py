"""The training resumes where it stopped, packs questions without leaking, and writes a checkpoint that exports."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from sinkprune.demo import pocket_model
from sinkprune.demo.scene_questions import KINDS, some
from sinkprune.demo.scenes import COLOURS, SHAPES, make_scene
from sinkprune.demo.train import Stage, Training
from sinkprune.demo.training_batches import pictures, turns
from sinkprune.demo.training_losses import answer_loss, tower_states

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


def test_a_resumed_training_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    unbroken = Training(tmp_path / "unbroken.pt")
    unbroken.run(STAGES)
    Training(tmp_path / "broken.pt").run(STAGES[:2])
    resumed = Training(tmp_path / "broken.pt")
    assert resumed.step == 2
    resumed.run(STAGES)
    assert resumed.step == 3
    ours, theirs = resumed.model.state_dict(), unbroken.model.state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    assert resumed.tokenizer.to_str() == unbroken.tokenizer.to_str()


def test_every_parameter_but_none_is_trained(tmp_path: Path) -> None:
    training = Training(tmp_path / "state.pt")
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.run(STAGES)
    after = training.model.state_dict()
    still = [name for name in before if torch.equal(before[name], after[name])]
    # Nothing reads the tower's own output norm: LLaVA takes hidden states.
    assert [name for name in still if "position_ids" not in name] == [
        name for name in before if "post_layernorm" in name
    ]


def test_turns_see_the_picture_and_themselves_only(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer
) -> None:
    scene, picture = make_scene("validation", 3)
    seen = pictures([(scene, picture)])
    tokens = tower_states(model, seen)[:, 1:]
    asked = turns([some(scene, Random(0), 5, list(KINDS))], tokenizer)
    together = answer_loss(model, tokens, asked)
    alone, answered = torch.zeros(()), 0
    for number in range(1, int(asked.turn.max()) + 1):
        one = asked.turn[0] == number
        turn = type(asked)(
            asked.before, asked.ids[:, one], asked.turn[:, one], asked.place[:, one], asked.targets[:, one]
        )
        count = int((turn.targets >= 0).sum())
        alone, answered = alone + count * answer_loss(model, tokens, turn), answered + count
    assert together.item() == pytest.approx(alone.item() / answered, rel=1e-4)


def test_a_turn_is_what_the_chat_template_writes(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pocket_model.save(model, tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    words = [{"type": "image"}, {"type": "text", "text": "Is there a red star?"}]
    rendered = theirs.apply_chat_template([{"role": "user", "content": words}], add_generation_prompt=True)
    before = tokenizer.encode(pocket_model.BEFORE).ids
    after = tokenizer.encode(pocket_model.AFTER.format("Is there a red star?"), add_special_tokens=False).ids
    assert rendered["input_ids"][-len(after) :] == after
    assert [*before, pocket_model.IMAGE, *after][-len(rendered["input_ids"]) :] == rendered["input_ids"]


def test_the_saved_features_are_the_trained_ones(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pocket_model.save(model, tokenizer, tmp_path)
    saved = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    seen = pictures([make_scene("validation", 0)])
    with torch.no_grad():
        features = saved.get_image_features(seen.pixels).pooler_output[0]
        trained = model.model.multi_modal_projector(tower_states(model, seen)[:, 1:])[0]
    assert torch.allclose(features, trained, atol=2e-2)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 16e6


def test_the_first_stages_show_the_things_first() -> None:
    scenes = [make_scene("validation", i) for i in range(4)]
    whole, some = pictures(scenes), pictures(scenes, 100)
    assert torch.equal(whole.patches, torch.arange(256).expand(4, -1))
    for i, row in enumerate(some.patches):
        assert row.tolist() == sorted(set(row.tolist()))
        assert torch.equal(some.classes[i], whole.classes[i][row])
        assert torch.equal(some.centres[i], whole.centres[i][row])
        things = (whole.classes[i, :, 0] > 0).sum()
        assert (some.classes[i, :, 0] > 0).sum() == things < 100


def test_patches_are_told_what_they_show() -> None:
    scene, picture = make_scene("validation", 2)
    seen = pictures([(scene, picture)])
    for thing in (*scene.objects, *scene.plates):
        patch = thing.y // pocket_model.PATCH * pocket_model.GRID + thing.x // pocket_model.PATCH
        classes = seen.classes[0, patch].tolist()
        assert classes[0] == (7 if thing.text else 1 + SHAPES.index(thing.shape))
        assert classes[1] == 1 + list(COLOURS).index(thing.colour)
        half = pocket_model.GRID / 2
        expected = [thing.x / pocket_model.PATCH - half, thing.y / pocket_model.PATCH - half]
        assert seen.centres[0, patch].tolist() == pytest.approx(expected)
        assert classes[4] == 1
    assert seen.classes[0, :, 4].sum() == len(scene.objects) + len(scene.plates)
