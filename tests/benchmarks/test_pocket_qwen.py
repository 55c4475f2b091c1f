"""The training of the pocket Qwen3-VL runs transformers' model, on pictures as its processor gives them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from pocket_training import qwen_model
from pocket_training.batches import turns
from pocket_training.decoding import read
from pocket_training.qwen_tower import patches
from pocket_training.recipes import RECIPES
from sinkprune import Pipeline
from sinkprune.demo.scenes import UNIT, make_varied
from sinkprune.export.command import main as export

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
