"""The training of the pocket LLaVA, of its tower with outliers, and of the pocket Qwen3-VL, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlavaForConditionalGeneration, Qwen3VLForConditionalGeneration

from pocket_training import model as pocket_model
from pocket_training import qwen_model
from pocket_training.batches import pictures, turns
from pocket_training.decoding import answer_loss, read, right_turns
from pocket_training.lessons import draw_questions
from pocket_training.losses import tower_states
from pocket_training.outliers import NORM, OUTLIERS, OutlierProbe, norm_loss, outliers
from pocket_training.qwen_tower import patches
from pocket_training.recipes import POCKET, RECIPES
from pocket_training.stages import Stage
from sinkprune import Pipeline
from sinkprune.demo.questions import KINDS
from sinkprune.demo.scenes import UNIT, make_scene, make_varied
from sinkprune.export.command import main as export
from train_pocket_model import Training

RECIPE, QWEN = RECIPES["llava"], RECIPES["qwen3"]
ASKED = "Is there a red star?"
ALL = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return pocket_model.new_tokenizer(scenes=60)


@pytest.fixture(scope="module")
def model() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    return pocket_model.new_model()


def rendered(folder: Path) -> list[int]:
    """The ids that the checkpoint's own template gives a question about a picture."""
    content = [{"type": "image"}, {"type": "text", "text": ASKED}]
    asked = [{"role": "user", "content": content}]
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(asked, add_generation_prompt=True)["input_ids"]


def test_turns_see_the_picture_and_themselves_only(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer
) -> None:
    scene, picture = make_scene("validation", 3)
    tokens = RECIPE.see(model, RECIPE.new_probe(model), [(scene, picture)], 256, 0).sight
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
    written = rendered(tmp_path)
    before = tokenizer.encode(pocket_model.DIALOGUE.before).ids
    after = tokenizer.encode(pocket_model.DIALOGUE.after.format(ASKED), add_special_tokens=False).ids
    assert [*before, pocket_model.IMAGE, *after][-len(written) :] == written
    assert written[-len(after) :] == after


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


@pytest.fixture(scope="module")
def qwen_tokenizer() -> Tokenizer:
    return qwen_model.new_tokenizer(scenes=60)


@pytest.fixture(scope="module")
def qwen() -> Qwen3VLForConditionalGeneration:
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
def test_packed_turns_of_qwen_give_the_logits_of_transformers(
    qwen: Qwen3VLForConditionalGeneration, qwen_tokenizer: Tokenizer, index: int
) -> None:
    drawn = make_varied("validation", index)
    (scene, picture) = drawn
    tokens = QWEN.see(qwen, QWEN.new_probe(qwen), [drawn], ALL, 0).sight
    asked = turns([QWEN.ask(scene, Random(0), 9, QWEN.measured)], qwen_tokenizer, QWEN.dialogue)
    reading, at, image = read(qwen, tokens, asked), 0, qwen.config.image_token_id
    width, height = picture.size
    qwen.set_attn_implementation("sdpa")
    for number in range(1, int(asked.turn.max()) + 1):
        one = asked.turn[0] == number
        visual = torch.full((width * height // UNIT**2,), image)
        ids = torch.cat([asked.before, visual, asked.ids[0, one]])[None]
        whole = qwen(
            input_ids=ids,
            pixel_values=torch.from_numpy(patches(picture)).flatten(0, 1),
            image_grid_thw=torch.tensor([[1, height // 14, width // 14]]),
            mm_token_type_ids=(ids == image).int(),
        ).logits[0]
        said = (asked.targets[0, one] >= 0).nonzero()[:, 0]
        expected = whole[len(asked.before) + len(visual) + said]
        assert torch.allclose(reading.logits[at : at + len(said)], expected, atol=1e-4)
        at += len(said)
    qwen.set_attn_implementation(qwen_model.IN_CHUNKS)
    assert at == len(reading.logits)


def test_the_checkpoint_of_qwen_is_small_exports_and_answers_as_in_training(
    qwen: Qwen3VLForConditionalGeneration, qwen_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    qwen_model.save(qwen, qwen_tokenizer, folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 15.7e6
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert "attn_implementation" not in str(config)
    before, after = (
        qwen_tokenizer.encode(text, add_special_tokens=False).ids
        for text in (QWEN.dialogue.before, QWEN.dialogue.after.format(ASKED))
    )
    assert rendered(folder) == [*before, config["image_token_id"], *after]

    assert export([str(folder), "-o", str(bundle), "--budgets", "prune-77.8", "--methods", "sinkpruner"]) == 0
    pipeline = Pipeline.load(bundle)
    drawn = make_varied("validation", 1)
    (scene, picture) = drawn
    answer = pipeline.generate(picture, ASKED, max_new_tokens=1)
    saved = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    saved.set_attn_implementation(qwen_model.IN_CHUNKS)
    sight = QWEN.see(saved, QWEN.new_probe(saved), [drawn], ALL, 0).sight
    question = QWEN.ask(scene, Random(0), 1, ("existence-random",))[0]
    question = type(question)("", "", ASKED, (answer.text,))
    asked = turns([[question]], qwen_tokenizer, QWEN.dialogue)
    (token,) = answer.token_ids
    assert int(read(saved, sight, asked).logits[0].argmax()) == token
    pruned = pipeline.generate(picture, ASKED, budget="prune-77.8", max_new_tokens=1)
    assert pruned.tokens_per_layer[0] < answer.tokens_per_layer[0]
