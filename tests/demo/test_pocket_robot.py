"""The pocket policies' checkpoints fit together, and pick what the instruction names, unpruned and pruned."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PI0ForConditionalGeneration

from pocket_training.robot.batches import instruction_ids, statistics
from pocket_training.robot.episodes import run_episodes
from pocket_training.robot.model import IMAGE
from pocket_training.robot.pi0 import Pi0Robot
from sinkprune import Policy, demo
from sinkprune.demo.robot_table import CAMERA_NAMES, RobotTable
from sinkprune.export.command import main as export

ROBOT = Path(demo.__file__).parent / "pocket-robot"
EPISODES = 12


@pytest.fixture(scope="module")
def model() -> PI0ForConditionalGeneration:
    loaded, report = PI0ForConditionalGeneration.from_pretrained(ROBOT, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROBOT / "tokenizer.json"))


@pytest.mark.parametrize("misnamed", [False, True])
def test_it_picks_what_the_instruction_names(
    model: PI0ForConditionalGeneration, tokenizer: Tokenizer, misnamed: bool
) -> None:
    robot = Pi0Robot()
    robot.model, robot.form = model, robot.form._replace(ids=partial(instruction_ids, tokenizer=tokenizer))
    success, picked = run_episodes(robot.act, "test", EPISODES, misnamed=misnamed)
    assert picked >= 0.75
    assert success == 0 if misnamed else success >= 0.75


def test_its_files_fit_together(model: PI0ForConditionalGeneration) -> None:
    fields = json.loads((ROBOT / "processor_config.json").read_text())
    assert {name: tuple(fields[name]) for name in statistics()._fields} == statistics()._asdict()
    assert tuple(fields["cameras"]) == CAMERA_NAMES
    assert fields["chunk_size"] == model.config.chunk_size
    assert fields["max_state_dim"] == model.config.max_state_dim == model.config.max_action_dim
    pictures = json.loads((ROBOT / "preprocessor_config.json").read_text())
    vision = model.config.vlm_config.vision_config
    assert pictures["pad_size"] == {"height": vision.image_size, "width": vision.image_size}
    assert pictures["image_seq_length"] == (vision.image_size // vision.patch_size) ** 2
    words = AutoTokenizer.from_pretrained(ROBOT)
    assert words.convert_tokens_to_ids("<image>") == model.config.vlm_config.image_token_id == IMAGE


OFT = Path(demo.__file__).parent / "pocket-oft"
OPTIONS = ["--max-images", "2", "--chunk", "8", "--bounds", "q01-q99", "--budgets", "prune-80"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    root = tmp_path_factory.mktemp("oft") / "oft"
    assert export([str(OFT), "-o", str(root), *OPTIONS]) == 0
    return Policy.load(root, threads=1)


@pytest.mark.parametrize(("budget", "misnamed"), [("none", False), ("none", True), ("prune-80", False)])
def test_the_exported_oft_picks_it_unpruned_and_pruned(policy: Policy, budget: str, misnamed: bool) -> None:
    def act(tables: list[RobotTable], instructions: list[str], seed: int) -> NDArray[np.float32]:
        chunks = (
            policy.act(table.cameras(), instruction, table.state(), budget=budget).actions
            for table, instruction in zip(tables, instructions, strict=True)
        )
        return np.stack([*chunks])

    success, picked = run_episodes(act, "test", 8, misnamed=misnamed)
    assert picked >= 0.75
    assert success == 0 if misnamed else success >= 0.75
