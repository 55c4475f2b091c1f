"""The preset of pi0 with random weights: its depth and its tokens, in a narrower model."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Policy
from sinkprune.contract.budgets import FAMILIES
from sinkprune.contract.errors import CheckpointError
from sinkprune.export.checkpoint.presets import PRESETS, small_text
from sinkprune.export.families import read_family
from support.programs.commands import run
from support.references.reference import one_stage

BUDGETS = tuple(FAMILIES["pi0"].budgets)
TOKENS, CAMERAS, LAYERS = 256, 3, 18


def narrow(config: Any) -> Any:
    """A preset's configuration with small matrices, three tower blocks and few words."""
    config = copy.deepcopy(config)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}
    vlm = config["vlm_config"]
    vlm |= {"projection_dim": 32, "image_token_id": 400}
    vlm["text_config"] |= {**heads, "hidden_size": 32, "vocab_size": 400}
    vlm["vision_config"] |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "projection_dim": 32,
    }
    config["dit_config"] |= {**heads, "hidden_size": 16}
    return config


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The narrow preset, exported with random weights for three cameras."""
    folder = tmp_path_factory.mktemp("preset")
    (folder / "config.json").write_text(json.dumps(narrow(PRESETS["pi0"])))
    done = run("sinkprune-export", folder, "--random-weights", "--max-images", CAMERAS, "-o", folder / "policy")
    assert done.code == 0, done.stderr
    return Policy.load(folder / "policy")


@pytest.mark.parametrize("budget", ["none", *BUDGETS])
def test_a_preset_acts(budget: str, policy: Policy, photo: Image.Image) -> None:
    cameras = [photo, photo.rotate(90), photo.crop((0, 0, 90, 50))]
    report = policy.act(cameras, "pick up the cup", [0.1] * 32, budget=budget, seed=0)
    assert report.actions.shape == (50, 32) and np.isfinite(report.actions).all()
    assert (report.visual_tokens, report.steps) == (CAMERAS * TOKENS, 10)
    # A quota for each camera: what one camera's tokens become, three times (docs/policies.md).
    stages, cut = [TOKENS] * 2, LAYERS
    if budget != "none":
        shares = FAMILIES["pi0"].budgets[budget]
        ((cut, left),) = one_stage(shares, TOKENS, LAYERS).items()
        stages = [shares.resolve(TOKENS).kept, left]
    expected = [stages[layer > cut] for layer in range(LAYERS)]
    assert report.tokens_per_layer == [CAMERAS * count for count in expected]
    for kept in report.images:
        assert kept.index.size == stages[0]
        assert [rows.size for rows in kept.after_stage.values()] == (stages[1:] if budget != "none" else [])


@pytest.mark.parametrize("image", [400, 399])
def test_the_tokenizer_of_random_weights_has_the_image_token(image: int) -> None:
    """As the token after the vocabulary, and inside it."""
    config = narrow(PRESETS["pi0"])
    config["vlm_config"]["image_token_id"] = image
    family = read_family("narrow", config)
    made = json.loads(small_text(400, family.special_tokens, family.chat_template).tokenizer_json)
    added = {token["id"]: token["content"] for token in made["added_tokens"]}
    assert added == {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", image: "<image>"}


def test_an_image_token_in_the_place_of_another_is_refused() -> None:
    config = narrow(PRESETS["pi0"])
    config["vlm_config"]["image_token_id"] = 2
    with pytest.raises(CheckpointError, match="expected 5 different ones below 400"):
        read_family("narrow", config).special_tokens  # noqa: B018
