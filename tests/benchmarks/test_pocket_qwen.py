"""The training of the pocket Qwen3-VL runs transformers' model, on pictures as its processor gives them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from pocket_training import qwen_model
from pocket_training.batches import turns
from pocket_training.decoding import answer_loss, read
from pocket_training.qwen_tower import patches, varied_pictures
from pocket_training.recipes import RECIPES
from pocket_training.stages import FIRST_LAYERS, QWEN_STAGES, Stage
from sinkprune import Pipeline
from sinkprune.demo.questions import VARIED_KINDS
from sinkprune.demo.scenes import SIZES, UNIT, make_varied
from sinkprune.export.command import main as export
from train_pocket_model import Training

RECIPE = RECIPES["qwen3"]
ALL = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return qwen_model.new_tokenizer(scenes=60)


@pytest.fixture(scope="module")
def model() -> Qwen3VLForConditionalGeneration:
    """The model with weights in all layers and in DeepStack, which start at zero."""
    torch.manual_seed(0)
    made = qwen_model.new_model()
    for merger in made.model.visual.deepstack_merger_list:
        torch.nn.init.normal_(merger.linear_fc2.weight, std=0.05)
    for layer in made.model.language_model.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.05)
        torch.nn.init.normal_(layer.mlp.down_proj.weight, std=0.05)
    return made.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("index", [0, 1, 4])
def test_packed_turns_give_the_logits_of_transformers(
    model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, index: int
) -> None:
    drawn = make_varied("validation", index)
    (scene, picture) = drawn
    tokens = RECIPE.see(model, RECIPE.new_probe(model), [drawn], ALL, 0).sight
    asked = turns([RECIPE.ask(scene, Random(0), 9, RECIPE.measured)], tokenizer, RECIPE.dialogue)
    reading, at, image = read(model, tokens, asked), 0, model.config.image_token_id
    width, height = picture.size
    model.set_attn_implementation("sdpa")
    for number in range(1, int(asked.turn.max()) + 1):
        one = asked.turn[0] == number
        visual = torch.full((width * height // UNIT**2,), image)
        ids = torch.cat([asked.before, visual, asked.ids[0, one]])[None]
        whole = model(
            input_ids=ids,
            pixel_values=torch.from_numpy(patches(picture)).flatten(0, 1),
            image_grid_thw=torch.tensor([[1, height // 14, width // 14]]),
            mm_token_type_ids=(ids == image).int(),
        ).logits[0]
        said = (asked.targets[0, one] >= 0).nonzero()[:, 0]
        expected = whole[len(asked.before) + len(visual) + said]
        assert torch.allclose(reading.logits[at : at + len(said)], expected, atol=1e-4)
        at += len(said)
    model.set_attn_implementation(qwen_model.IN_CHUNKS)
    assert at == len(reading.logits)


def test_layers_that_are_trained_later_pass_their_input_on(tokenizer: Tokenizer) -> None:
    torch.manual_seed(1)
    started, drawn = qwen_model.new_model(), make_varied("validation", 2)
    asked = turns([RECIPE.ask(drawn[0], Random(0), 4, RECIPE.measured)], tokenizer, RECIPE.dialogue)
    tokens = RECIPE.see(started, RECIPE.new_probe(started), [drawn], ALL, 0).sight
    few, every = (read(started, tokens, asked, layers) for layers in (FIRST_LAYERS, None))
    assert set(few.hidden) == set(FIRST_LAYERS) and len(every.hidden) == 24
    assert torch.allclose(few.logits, every.logits, atol=1e-5)
    answer_loss(every, asked).backward()
    for number, layer in enumerate(started.model.language_model.layers):
        assert layer.mlp.down_proj.weight.grad.abs().max() > 0
        assert (layer.mlp.up_proj.weight.grad.abs().max() > 0) == (number in FIRST_LAYERS)


@pytest.mark.parametrize("size", [SIZES[0], SIZES[3], SIZES[4]])
def test_patches_are_those_of_the_image_processor(size: tuple[int, int], tmp_path: Path) -> None:
    picture = next(p for p in (make_varied("validation", i)[1] for i in range(200)) if p.size == size)
    processor = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, min_pixels=784, max_pixels=200704, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    expected = processor(images=[picture], return_tensors="np")
    assert expected["image_grid_thw"].tolist() == [[1, size[1] // 14, size[0] // 14]]
    assert np.allclose(patches(picture).reshape(-1, 1176), expected["pixel_values"], atol=1e-6)


def test_pictures_of_a_step_show_their_things_first() -> None:
    drawn = [make_varied("validation", i) for i in range(6)]
    seen, side = varied_pictures(drawn, 40, 16), 16
    assert seen.classes.shape == (6, 40, 5) and seen.patch_classes.shape == (6, 160, 5)
    assert seen.pixels.shape == (960, 1176)
    for row, (scene, picture) in enumerate(drawn):
        assert int(seen.extent[row]) == max(picture.size) // UNIT
        places = seen.places.view(6, 40, 4, 2)[row]
        at = [(y // 2, x // 2) for y, x in places[:, 0].tolist()]
        raster = patches(picture).reshape(picture.height // UNIT, picture.width // UNIT, 4, -1)
        for token, (y, x) in enumerate(at):
            assert places[token].tolist() == [[2 * y + i, 2 * x + j] for i in (0, 1) for j in (0, 1)]
            shown = seen.pixels.view(6, 40, 4, -1)[row, token].numpy()
            assert np.array_equal(shown, raster[y, x])
        assert int(seen.classes[row, :, 4].sum()) == len(scene.things)
        for thing in scene.things:
            token = at.index((thing.y // UNIT, thing.x // UNIT))
            shape, colour, _, _, centre = seen.classes[row, token].tolist()
            assert RECIPE.names.shown[0][shape] == thing.shape
            assert (RECIPE.names.shown[1][colour], centre) == (thing.colour, 1)
            patch = places[token].tolist().index([thing.y // 14, thing.x // 14])
            assert seen.patch_classes[row, 4 * token + patch, 4] == 1
            expected = [16 * (thing.x / picture.width - 0.5), 16 * (thing.y / picture.height - 0.5)]
            assert seen.centres[row, 4 * token + patch].tolist() == pytest.approx(expected, abs=1e-5)
    whole = varied_pictures(drawn[:1], ALL, side)
    assert whole.classes.shape[1] == drawn[0][1].width * drawn[0][1].height // UNIT**2


@pytest.mark.slow
def test_the_stages_show_whole_pictures_of_one_size_last() -> None:
    whole, early = QWEN_STAGES[-1], QWEN_STAGES[1]
    drawn = RECIPE.draw(whole, 50)
    assert len(drawn) == whole.pictures and len({picture.size for _, picture in drawn}) == 1
    drawn = RECIPE.draw(early, 7)
    assert len({picture.size for _, picture in drawn}) > 1
    assert max(len(scene.objects) for scene, _ in drawn) <= early.most_objects
    sizes = next(stage for stage in QWEN_STAGES if stage.name == "sizes")
    shrunk = [RECIPE.draw(sizes, 6 * step) for step in range(30)]
    assert 6 <= sum(min(p.width * p.height for _, p in drawn) < 64 * UNIT**2 for drawn in shrunk) <= 18
    assert all(scene.size == picture.size for drawn in shrunk for scene, picture in drawn)
    asked = {kind for stage in QWEN_STAGES for kind in stage.kinds if stage.questions}
    assert asked >= set(RECIPE.measured)
    assert asked - {"place"} == set(VARIED_KINDS) - {"first-of-two", "second-of-two"}


def test_the_checkpoint_is_small_exports_and_answers_as_in_training(
    model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    qwen_model.save(model, tokenizer, folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 15.7e6
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert "attn_implementation" not in str(config)
    content = [{"type": "image"}, {"type": "text", "text": "Is there a red star?"}]
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )["input_ids"]
    before, after = (
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in (RECIPE.dialogue.before, RECIPE.dialogue.after.format("Is there a red star?"))
    )
    assert rendered == [*before, config["image_token_id"], *after]

    assert export([str(folder), "-o", str(bundle), "--budgets", "prune-77.8", "--methods", "sinkpruner"]) == 0
    pipeline = Pipeline.load(bundle)
    drawn = make_varied("validation", 1)
    (scene, picture) = drawn
    answer = pipeline.generate(picture, "Is there a red star?", max_new_tokens=1)
    saved = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    saved.set_attn_implementation(qwen_model.IN_CHUNKS)
    sight = RECIPE.see(saved, RECIPE.new_probe(saved), [drawn], ALL, 0).sight
    question = RECIPE.ask(scene, Random(0), 1, ("existence-random",))[0]
    question = type(question)("", "", "Is there a red star?", (answer.text,))
    asked = turns([[question]], tokenizer, RECIPE.dialogue)
    (token,) = answer.token_ids
    assert int(read(saved, sight, asked).logits[0].argmax()) == token
    pruned = pipeline.generate(picture, "Is there a red star?", budget="prune-77.8", max_new_tokens=1)
    assert pruned.tokens_per_layer[0] < answer.tokens_per_layer[0]


@pytest.mark.slow
def test_a_step_of_each_kind_trains_what_it_should(tmp_path: Path) -> None:
    training = Training(tmp_path / "state.pt", RECIPE)
    before = {name: value.clone() for name, value in training.model.named_parameters()}
    layers = (0, 1, 2, 3, 4, 6, 8)
    kinds = ("colour", "two-step-place")
    training.run([Stage("vision", 1, 2, (1e-3, 1e-3), visual_tokens=8)])
    after = dict(training.model.named_parameters())
    assert not torch.equal(
        before["model.visual.blocks.0.attn.qkv.weight"], after["model.visual.blocks.0.attn.qkv.weight"]
    )
    assert torch.equal(
        before["model.language_model.layers.0.mlp.up_proj.weight"],
        after["model.language_model.layers.0.mlp.up_proj.weight"],
    )
    stages = [
        Stage("vision", 1, 2, (1e-3, 1e-3), visual_tokens=8),
        Stage("few", 1, 2, (1e-3, 1e-3), 3, 12, kinds=kinds, layers=layers),
    ]
    resumed = Training(tmp_path / "state.pt", RECIPE)
    resumed.run(stages)
    assert resumed.step == 2 and resumed.tokenizer.to_str() == training.tokenizer.to_str()
    changed = {
        number
        for number in range(24)
        if not torch.equal(
            before[name := f"model.language_model.layers.{number}.mlp.down_proj.weight"],
            dict(resumed.model.named_parameters())[name],
        )
    }
    assert changed == set(layers)
    accuracy = resumed.measure(layers)
    assert set(accuracy) == {"all", *RECIPE.measured}
    assert all(0 <= value <= 1 for value in accuracy.values())
