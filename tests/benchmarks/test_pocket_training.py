"""The training resumes where it stopped, packs questions without leaking, and writes a checkpoint that exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from pocket_training import model as pocket_model
from pocket_training.attention import looking_loss
from pocket_training.batches import pictures, turns, words
from pocket_training.chunks import IN_CHUNKS
from pocket_training.decoding import Sight, answer_loss, read, right_turns
from pocket_training.lessons import draw_questions
from pocket_training.losses import tower_states
from pocket_training.recipes import RECIPES
from pocket_training.stages import Stage
from sinkprune.contract.questions import Question
from sinkprune.demo.questions import KINDS
from sinkprune.demo.scenes import COLOURS, SHAPES, Scene, make_scene
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


def test_a_picture_may_have_no_questions(model: LlavaForConditionalGeneration, tokenizer: Tokenizer) -> None:
    scene, picture = make_scene("validation", 3)
    question = draw_questions(scene, Random(0), 1, ["counting"])
    asked = turns([question, []], tokenizer)
    assert asked.turn.unique().tolist() == [-1, 1] and not (asked.turn[1] >= 0).any()
    seen = RECIPE.see(model, RECIPE.new_probe(model), 2 * [(scene, picture)], 256, 0)
    reading = read(model, seen.sight, asked)
    assert [len(row) for row in right_turns(reading, asked)] == [1, 0]
    alone = turns([question], tokenizer)
    expected = answer_loss(read(model, sight(model, picture, scene), alone), alone).item()
    assert answer_loss(reading, asked).item() == pytest.approx(expected, rel=1e-4)


def test_an_answer_is_right_if_all_its_tokens_are(model: LlavaForConditionalGeneration, tokenizer: Tokenizer) -> None:
    scene, picture = make_scene("validation", 3)
    asked = turns([draw_questions(scene, Random(0), 6, list(KINDS))], tokenizer)
    reading = read(model, sight(model, picture, scene), asked)
    said, turn = asked.targets >= 0, asked.turn
    right = torch.nn.functional.one_hot(asked.targets[said], reading.logits.shape[1]).float()
    count = int(turn.max())
    assert right_turns(replace(reading, logits=right), asked) == [[True] * count]
    for token in range(len(right)):
        wrong = right.clone()
        wrong[token] = -wrong[token]
        number = int(turn[said][token])
        expected = [other != number for other in range(1, count + 1)]
        assert right_turns(replace(reading, logits=wrong), asked) == [expected]


def test_the_looking_loss_is_that_of_the_attention(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer
) -> None:
    scene, picture = make_scene("validation", 2)
    seen, thing = pictures([(scene, picture)]), scene.objects[0]
    asked = turns(
        [[Question("", "", f"Is the {thing.colour} {thing.shape} small or large?", (thing.size,))]], tokenizer
    )
    reading = read(model, sight(model, picture, scene), asked)
    loss = looking_loss(model, reading, asked, seen.classes, words(tokenizer), RECIPE.lessons)

    decoder, text = model.model.language_model, reading.visual.stop
    decoder.set_attn_implementation("eager")
    eager = decoder(inputs_embeds=reading.hidden[0], position_ids=reading.position, output_attentions=True)
    decoder.set_attn_implementation(IN_CHUNKS)
    tokens = [tokenizer.id_to_token(i) for i in asked.ids[0].tolist()]
    of_colour = seen.classes[0, :, 1] == 1 + list(COLOURS).index(thing.colour)
    of_shape = seen.classes[0, :, 0] == 1 + SHAPES.index(thing.shape)
    row, place = seen.classes.shape[1], reading.visual.start
    both, centre = of_shape & of_colour, seen.classes[0, :, -1] == 1
    at = {word: tokens.index(f"Ġ{word}") for word in (thing.colour, thing.shape)}
    begins = int((asked.targets[0] >= 0).nonzero()[0])

    def share(layer: int, heads: slice, token: int, patches: torch.Tensor) -> torch.Tensor:
        return eager.attentions[layer][0, heads, text + token, place : place + row][:, patches]

    def at_any(layer: int, token: int, patches: torch.Tensor) -> float:
        return -share(layer, slice(0, 3), token, patches).sum(-1).log().mean().item()

    def at_each(layer: int, token: int, patches: torch.Tensor) -> float:
        looks = torch.cat(
            [eager.attentions[layer][0, 3:, text + token, :1], share(layer, slice(3, 6), token, patches)], 1
        )
        return -looks.log().mean().item()

    def both_words(lesson: Callable[..., float], layer: int, of_shape: torch.Tensor) -> float:
        return (lesson(layer, at[thing.colour], of_colour) + lesson(layer, at[thing.shape], of_shape)) / 2

    expected = [both_words(at_any, 1, of_shape), both_words(at_any, 2, both), both_words(at_any, 3, both)]
    expected += [
        (at_each(layer, at[thing.colour], of_colour & centre) + at_each(layer, at[thing.shape], both & centre)) / 2
        for layer in (2, 3)
    ]
    expected += [at_any(layer, begins, both) for layer in (4, 5, 6)]
    word = text + at[thing.shape]
    expected += [-eager.attentions[layer][0, 3:, text + begins, word].log().mean().item() for layer in (4, 5)]
    assert loss.item() == pytest.approx(sum(expected) / 10, rel=1e-3)


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


def test_patches_have_targets_and_few_patches_show_things_first() -> None:
    scenes = [make_scene("validation", i) for i in range(4)]
    whole, draw_questions = pictures(scenes), pictures(scenes, 100)
    for i, (scene, _) in enumerate(scenes):
        for thing in (*scene.objects, *scene.plates):
            patch = thing.y // pocket_model.PATCH * pocket_model.GRID + thing.x // pocket_model.PATCH
            shape, colour, _, _, centre = whole.classes[i, patch].tolist()
            assert shape == (7 if thing.text else 1 + SHAPES.index(thing.shape))
            assert (colour, centre) == (1 + list(COLOURS).index(thing.colour), 1)
            expected = [place / pocket_model.PATCH - pocket_model.GRID / 2 for place in (thing.x, thing.y)]
            assert whole.centres[i, patch].tolist() == pytest.approx(expected)
        assert whole.classes[i, :, 4].sum() == len(scene.objects) + len(scene.plates)
        row = draw_questions.patches[i]
        assert torch.equal(draw_questions.classes[i], whole.classes[i][row])
        assert (draw_questions.classes[i, :, 0] > 0).sum() == (whole.classes[i, :, 0] > 0).sum() < 100
