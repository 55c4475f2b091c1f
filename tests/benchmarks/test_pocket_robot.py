"""The training of the pocket robot runs transformers' pi0, on pictures and states as its processor gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PI0ForConditionalGeneration

from pocket_training.robot import pi0
from pocket_training.robot.batches import Batch, draw_batch, normalised, statistics
from pocket_training.robot.losses import looking_loss, naming_loss
from pocket_training.robot.model import CHUNK, GRID, IMAGE
from pocket_training.robot.oft import OftRobot
from pocket_training.robot.pi0 import Pi0Robot, flow_loss
from pocket_training.stages import Stage
from sinkprune import Policy
from sinkprune.demo.robot_table import RobotTable
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from train_pocket_robot import RobotTraining

ALL = GRID**2
TINY = Stage("tiny", 3, 1, (1e-3, 1e-3), 1, 12, 0.3, 2)


@pytest.fixture(scope="module")
def robot() -> Pi0Robot:
    torch.manual_seed(0)
    made = Pi0Robot()
    made.model.eval().requires_grad_(requires_grad=False)
    return made


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


def test_the_loss_is_that_of_transformers(robot: Pi0Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model, draws = draw_batch(5, 1, 5, ALL, robot.form), robot.model, 3
    count = len(batch.ids)
    torch.manual_seed(0)
    times, noise = torch.rand(count, draws), torch.randn(count, draws, CHUNK, 3)
    monkeypatch.setattr(torch.distributions.Beta, "sample", lambda self, shape: times)
    monkeypatch.setattr(pi0.torch, "randn", lambda *shape: noise)
    found = flow_loss(model, robot.read(robot.see(batch), batch), batch, draws)
    time = times * model.config.time_sampling_scale + model.config.time_sampling_offset
    expected = [
        model(**_inputs(batch), actions=batch.actions, noise=noise[:, draw], timestep=time[:, draw]).loss
        for draw in range(draws)
    ]
    assert torch.allclose(found, torch.stack(expected).mean(), atol=1e-5)


def test_a_batch_is_normalised_as_the_processor_does(robot: Pi0Robot) -> None:
    found = statistics()
    batch = draw_batch(9, 6, 5, 4, robot.form)
    assert batch.state.shape == (24, 3) and (batch.state[:, 2] == 0).all()
    assert batch.actions.shape == (24, CHUNK, 3)
    assert batch.actions.flatten(0, 1).std(0).sub(1).abs().max() < 0.3
    closed = batch.actions[..., 2] * (found.actions_std[2] + 1e-8) + found.actions_mean[2]
    assert torch.allclose(closed, closed.round(), atol=1e-5) and set(closed.round().unique().tolist()) == {0, 1}
    table = RobotTable("training 9")
    picture = normalised(table.cameras()[0])
    assert np.allclose(picture, (np.asarray(table.cameras()[0]).transpose(2, 0, 1) / 255 - 0.5) / 0.5, atol=1e-6)


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


def test_the_checkpoint_is_the_model(robot: Pi0Robot, tmp_path: Path) -> None:
    robot.save(tmp_path)
    assert all(value.dtype == torch.float16 for value in load_file(tmp_path / "model.safetensors").values())
    other, table = Pi0Robot(), RobotTable("checkpoint")
    other.model = PI0ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours, theirs = (each.act([table], [table.instruction], 0) for each in (robot, other))
    assert ours.shape == (1, CHUNK, 3) and np.allclose(ours, theirs, atol=1e-2)
    ids = AutoTokenizer.from_pretrained(tmp_path)(f"<bos>{table.instruction}\n", add_special_tokens=False).input_ids
    assert ids == robot.form.ids(table.instruction)
    fields = json.loads((tmp_path / "processor_config.json").read_text())
    assert fields["actions_std"] == list(statistics().actions_std) and fields["chunk_size"] == CHUNK
    assert fields["image_processor"] == json.loads((tmp_path / "preprocessor_config.json").read_text())


def test_openvla_oft_acts_as_its_exported_checkpoint(tmp_path: Path) -> None:
    """Its SigLIP and decoder are those of the trained pi0: visual tokens lie near the words for what they show."""
    torch.manual_seed(0)
    robot, table = OftRobot(), RobotTable("checkpoint")
    batch = draw_batch(9, 1, 5, ALL, robot.form)
    seen = robot.see(batch)
    words = robot.decoder.get_input_embeddings().weight
    assert naming_loss(words, seen, batch, robot.tokenizer) < 0.5
    assert looking_loss(robot.decoder, robot.read(seen, batch), batch) < 0.05
    # As the files round it.
    for weight in robot.model.parameters():
        weight.data = weight.data.half().float()
    robot.save(tmp_path / "checkpoint")
    request = ExportRequest(str(tmp_path / "checkpoint"), ("prune-80",), max_images=2, chunk=CHUNK, bounds="q01-q99")
    export_bundle(request, tmp_path / "bundle")
    policy = Policy.load(tmp_path / "bundle")
    expected = robot.act([table], [table.instruction], 0)[0]
    found = policy.act([*table.cameras()], table.instruction, table.state()).actions
    np.testing.assert_allclose(found, expected, atol=1e-4)
