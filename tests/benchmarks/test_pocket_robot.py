"""The training of the pocket robot runs transformers' pi0, on pictures and states as its processor gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PI0ForConditionalGeneration

from pocket_training.robot import losses
from pocket_training.robot.batches import Batch, draw_batch, instruction_ids, normalised, patch_targets, statistics
from pocket_training.robot.episodes import act, run_episodes
from pocket_training.robot.losses import flow_loss, looking_loss, run_prefix, run_tower
from pocket_training.robot.model import CHUNK, GRID, IMAGE, new_model, new_tokenizer, save
from pocket_training.stages import Stage
from sinkprune.demo.robot_table import CANVAS, SIDE, RobotTable
from sinkprune.demo.scenes import COLOURS, SHAPES
from train_pocket_robot import RobotTraining

ALL = GRID**2
TINY = Stage("tiny", 3, 1, (1e-3, 1e-3), 1, 12, 0.3, 2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return new_tokenizer()


@pytest.fixture(scope="module")
def model() -> PI0ForConditionalGeneration:
    torch.manual_seed(0)
    return new_model().eval().requires_grad_(requires_grad=False)


def _flow(model: PI0ForConditionalGeneration, batch: Batch, draws: int) -> torch.Tensor:
    torch.manual_seed(3)
    return flow_loss(model, run_prefix(model, run_tower(model, batch), batch), batch, draws)


def _inputs(batch: Batch) -> dict[str, torch.Tensor]:
    count = len(batch.ids)
    ids = torch.cat([torch.full((count, 2 * ALL), IMAGE), batch.ids], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": batch.pixels,
        "pixel_attention_mask": torch.ones(count, 2, dtype=torch.bool),
        "state": batch.state,
    }


@pytest.mark.parametrize("draws", [1, 3])
def test_the_loss_is_that_of_transformers(
    model: PI0ForConditionalGeneration, tokenizer: Tokenizer, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = draw_batch(5, 1, 5, ALL, tokenizer)
    count = len(batch.ids)
    torch.manual_seed(0)
    times, noise = torch.rand(count, draws), torch.randn(count, draws, CHUNK, 3)
    monkeypatch.setattr(torch.distributions.Beta, "sample", lambda self, shape: times)
    monkeypatch.setattr(losses.torch, "randn", lambda *shape: noise)
    found = _flow(model, batch, draws)
    time = times * model.config.time_sampling_scale + model.config.time_sampling_offset
    expected = [
        model(**_inputs(batch), actions=batch.actions, noise=noise[:, draw], timestep=time[:, draw]).loss
        for draw in range(draws)
    ]
    assert torch.allclose(found, torch.stack(expected).mean(), atol=1e-5)


def test_the_model_acts_as_it_is_trained(model: PI0ForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """One step of denoising by `sample_actions` is the velocity of the training's forward pass."""
    batch = draw_batch(6, 1, 5, ALL, tokenizer)
    noise = torch.randn(len(batch.ids), CHUNK, 3)
    sampled = model.sample_actions(**_inputs(batch), noise=noise, num_steps=1)
    velocity = model(**_inputs(batch), noise=noise, timestep=torch.ones(len(batch.ids))).logits
    assert torch.allclose(sampled, noise - velocity, atol=1e-5)


def test_shown_patches_are_those_of_the_whole_picture(
    model: PI0ForConditionalGeneration, tokenizer: Tokenizer
) -> None:
    whole, few = (draw_batch(7, 1, 5, shown, tokenizer) for shown in (ALL, 9))
    assert few.patches.shape == (4, 2, 9)
    for field in ("classes", "centres"):
        every, kept = getattr(whole, field), getattr(few, field)
        places = few.patches[..., None].expand(-1, -1, -1, every.shape[-1])
        assert torch.equal(every.gather(2, places), kept)
    shown = few.classes[..., 0] > 0
    # Objects have more than nine patches, and come first.
    assert shown[:, 0].all()
    places = run_prefix(model, run_tower(model, few), few).places
    assert torch.equal(places[:, :9], few.patches[:, 0]) and torch.equal(places[:, 9:18], few.patches[:, 1] + ALL)
    assert (places[:, 18:] == 2 * ALL + torch.arange(few.ids.shape[1])).all()


def test_looks_are_the_attention_of_transformers(model: PI0ForConditionalGeneration, tokenizer: Tokenizer) -> None:
    batch = draw_batch(3, 1, 5, 30, tokenizer)
    prefix = run_prefix(model, run_tower(model, batch), batch)
    rows = prefix.layers[0]
    everything = torch.zeros(len(rows), 1, rows.shape[1], rows.shape[1])
    attentions = model.model.vlm.language_model(
        inputs_embeds=rows, position_ids=prefix.places, attention_mask=everything, output_attentions=True
    ).attentions
    shape, colour, target = (values.flatten(1) for values in batch.classes.unbind(-1))
    by_layer = []
    for layer in (1, 2, 3, 4, 5):
        found = []
        for moment in range(len(rows)):
            named = int(target[moment].nonzero()[0])
            same = [colour[moment] == colour[moment, named], shape[moment] == shape[moment, named]]
            # Rows from the end: the line's end, the shape, the colour.
            looks = [(-3, same[0]), (-2, same[1])] if layer == 1 else [(row, target[moment] == 1) for row in (-2, -1)]
            for row, wanted in looks:
                for head in (0, 1):
                    found.append(-attentions[layer][moment, head, row, :60][wanted].sum().log())
        by_layer.append(torch.stack(found).mean())
    assert torch.allclose(looking_loss(model, prefix, batch), torch.stack(by_layer).mean(), atol=1e-5)


def test_a_batch_is_normalised_as_the_processor_does(tokenizer: Tokenizer) -> None:
    found = statistics()
    batch = draw_batch(9, 6, 5, 4, tokenizer)
    assert batch.state.shape == (24, 3) and (batch.state[:, 2] == 0).all()
    assert batch.actions.shape == (24, CHUNK, 3)
    assert batch.actions.flatten(0, 1).std(0).sub(1).abs().max() < 0.3
    closed = batch.actions[..., 2] * (found.actions_std[2] + 1e-8) + found.actions_mean[2]
    assert torch.allclose(closed, closed.round(), atol=1e-5) and set(closed.round().unique().tolist()) == {0, 1}
    table = RobotTable("training 9")
    picture = normalised(table.cameras()[0])
    assert np.allclose(picture, (np.asarray(table.cameras()[0]).transpose(2, 0, 1) / 255 - 0.5) / 0.5, atol=1e-6)


def test_an_instruction_has_a_token_for_each_word(tokenizer: Tokenizer) -> None:
    for colour in COLOURS:
        for shape in SHAPES:
            ids = instruction_ids(f"pick the {colour} {shape}", tokenizer)
            assert len(ids) == 6
            assert ids[3:5] == [tokenizer.token_to_id(f"Ġ{word}") for word in (colour, shape)]


def test_targets_are_what_the_pictures_show() -> None:
    for seed in range(10):
        table = RobotTable(f"targets {seed}")
        corner = np.round(table.gripper * CANVAS) - SIDE // 2
        for picture, scale, start in zip(table.cameras(), (0.5, 1.0), (np.zeros(2), corner), strict=True):
            classes, centres = patch_targets(table, scale, start)
            for patch in np.flatnonzero(classes[:, 3]):
                x, y = (centres[patch] * 8 + SIDE / 2).round().astype(int)
                shape, colour, target, _ = classes[patch]
                near = [
                    i for i in range(len(table.objects)) if (abs(_seen(table, i, scale, start) - [x, y]) < 2).all()
                ]
                (number,) = near
                thing = table.objects[number]
                assert (SHAPES[shape - 1], list(COLOURS)[colour - 1]) == (thing.shape, thing.colour)
                assert target == (number == table.target)
                pixel = picture.getpixel((min(max(x, 0), SIDE - 1), min(max(y, 0), SIDE - 1)))
                assert thing.shape == "ring" or pixel in (COLOURS[thing.colour], (20, 20, 24))


def _seen(table: RobotTable, number: int, scale: float, corner: np.ndarray) -> np.ndarray:
    thing = table.objects[number]
    return (np.array([thing.x, thing.y]) - corner) * scale


@pytest.mark.slow
def test_steps_lower_the_loss_and_resume(tmp_path: Path) -> None:
    training = RobotTraining(tmp_path / "a.pt")
    lost = [training.train(TINY, step, 0, 1e-3) for step in range(6)]
    assert all(lost[-1][name] < lost[0][name] for name in lost[0])
    whole, halves = RobotTraining(tmp_path / "whole.pt"), tmp_path / "halves.pt"
    whole.run([TINY])
    RobotTraining(halves).run([replace(TINY, steps=2)])
    resumed = RobotTraining(halves)
    assert resumed.step == 2
    resumed.run([TINY])
    assert resumed.step == whole.step == 3
    for one, other in zip(whole.parameters, resumed.parameters, strict=True):
        assert torch.equal(one, other)
    assert (
        (tmp_path / "whole.csv")
        .read_text()
        .startswith("step,stage,seconds,rate,patches,names,points,looks,flow\n0,tiny,")
    )


def test_the_checkpoint_is_the_model(
    model: PI0ForConditionalGeneration, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save(model, tokenizer, statistics(), tmp_path)
    assert all(value.dtype == torch.float16 for value in load_file(tmp_path / "model.safetensors").values())
    loaded = PI0ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    table = RobotTable("checkpoint")
    ours, theirs = (act(each, tokenizer, [table], [table.instruction], 0) for each in (model, loaded))
    assert ours.shape == (1, CHUNK, 3) and np.allclose(ours, theirs, atol=1e-2)
    ids = AutoTokenizer.from_pretrained(tmp_path)(f"<bos>{table.instruction}\n", add_special_tokens=False).input_ids
    assert ids == instruction_ids(table.instruction, tokenizer)
    fields = json.loads((tmp_path / "processor_config.json").read_text())
    assert fields["actions_std"] == list(statistics().actions_std) and fields["chunk_size"] == CHUNK
    assert fields["image_processor"] == json.loads((tmp_path / "preprocessor_config.json").read_text())


def test_episodes_end_and_count_the_target(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that acts as the expert does for the instruction picks the target, and never a misnamed one."""

    class Expert:
        def eval(self) -> None:
            """Do nothing."""

    def chosen(
        model: object, tokenizer: Tokenizer, tables: list[RobotTable], instructions: list[str], seed: int
    ) -> np.ndarray:
        chunks = []
        for table, instruction in zip(tables, instructions, strict=True):
            target, named = table.target, [f"pick the {' '.join(thing.pair)}" for thing in table.objects]
            table.target = named.index(instruction)
            chunks.append(table.plan(CHUNK))
            table.target = target
        return np.stack(chunks)

    monkeypatch.setattr("pocket_training.robot.episodes.act", chosen)
    assert run_episodes(Expert(), tokenizer, "x", 10) == (1.0, 1.0)
    assert run_episodes(Expert(), tokenizer, "x", 10, misnamed=True) == (0.0, 1.0)
