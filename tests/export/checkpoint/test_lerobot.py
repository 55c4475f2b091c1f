"""Checkpoints in LeRobot's form: the chunks of the same weights in transformers' form, and what is rejected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from sinkprune import Policy
from sinkprune.contract.errors import CheckpointError, ImageError, PromptError, SinkpruneError, UsageError
from sinkprune.contract.image_settings import LeRobotSettings
from sinkprune.engines.limits import resolve_limits
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.checkpoint.lerobot import translated_config
from sinkprune.export.command import main
from sinkprune.export.presets import PRESETS
from sinkprune.export.source import ExportRequest, open_source
from support.models.lerobot_checkpoints import (
    CAMERAS,
    EMPTY,
    TOKENIZER_FILES,
    use_small_sizes,
    write_lerobot_checkpoint,
)
from support.models.pi0_checkpoints import pi0_tokenizer
from support.references.pi0 import INSTRUCTION

Array = np.ndarray[Any, Any]
Checkpoints = Callable[[str], Path]
BUDGET = "prune-77.8"
STATE = [0.4, -1.2, 2.0, 0.1, 0.9]


def drawn(*names: str) -> dict[str, dict[str, Array]]:
    """Statistics of states of 5 numbers and actions of 3."""
    random = np.random.default_rng(3)
    return {
        key: {
            name: (random.uniform(0.3, 1, width) + (2 if name in ("max", "q99", "q90") else 0)).astype(np.float32)
            for name in names
        }
        for key, width in (("observation.state", 5), ("action", 3))
    }


@pytest.fixture
def source(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small pi0 in transformers' form, whose sizes LeRobot's variants name in the test."""
    use_small_sizes(monkeypatch, checkpoint("pi0"))
    return checkpoint("pi0")


def exported(folder: Path, output: Path, **options: Any) -> Policy:
    export_bundle(ExportRequest(str(folder), budgets=(BUDGET,), **options), output)
    return Policy.load(output)


def noise(policy: Policy) -> Array:
    shape = policy.facts.chunk, policy.facts.action_dim
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def expert_inputs(policy: Policy) -> list[dict[str, Array]]:
    """The inputs of each call of the expert from now on."""
    seen: list[dict[str, Array]] = []
    chain = policy._model.chain
    last = chain.last

    def recorded(inputs: Any) -> Any:
        seen.append({name: np.array(chain.backend.numpy(inputs[name])) for name in ("state",)})
        return last(inputs)

    chain.last = recorded  # type: ignore[method-assign,assignment]
    return seen


def test_chunks_equal_those_of_the_other_form(source: Path, photo: Image.Image, tmp_path: Path) -> None:
    """With the same statistics, and frames of the tower's size, which neither form resizes."""
    statistics = drawn("mean", "std")
    lerobot = exported(write_lerobot_checkpoint(source, tmp_path / "lerobot", statistics), tmp_path / "a")
    other = tmp_path / "other"
    shutil.copytree(source, other)
    settings = json.loads((other / "processor_config.json").read_text())
    for own, key in (("state", "observation.state"), ("actions", "action")):
        settings |= {f"{own}_{name}": values.tolist() for name, values in statistics[key].items()}
    (other / "processor_config.json").write_text(json.dumps(settings))
    expected = exported(other, tmp_path / "b", max_images=3)
    frames = [photo.resize((112, 112)), photo.crop((30, 40, 142, 152)), None]
    for budget in ("none", BUDGET):
        given: dict[str, Any] = {"noise": noise(lerobot), "steps": 10, "budget": budget}
        chunks = [each.act(frames, INSTRUCTION, STATE, **given).actions for each in (lerobot, expected)]
        assert np.abs(chunks[1]).max() > 0.5
        np.testing.assert_allclose(*chunks, atol=1e-6)
    assert lerobot.facts.cameras == (*CAMERAS, EMPTY)
    assert lerobot.bundle.manifest.max_images == 3
    assert lerobot.facts.most_prompt_tokens == 48
    assert (
        resolve_limits(lerobot.bundle.manifest, prompt_tokens=None, new_tokens=None, images=None).prompt_tokens == 48
    )


@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [("QUANTILES", "q01", "q99"), ("MIN_MAX", "min", "max"), ("QUANTILE10", "q10", "q90")],
)
def test_ranges_become_minus_one_to_one(
    mode: str, low: str, high: str, source: Path, photo: Image.Image, tmp_path: Path
) -> None:
    """As LeRobot computes them, also for a number that never changed in the training: LeRobot makes it -1."""
    statistics = drawn(low, high)
    for own in statistics.values():
        own[high][1] = own[low][1]
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", statistics, modes=(mode, mode))
    policy = exported(folder, tmp_path / "bundle")
    seen, own = expert_inputs(policy), statistics["observation.state"]
    state = np.array(STATE, np.float32)
    state[1] = own[low][1]
    begun = noise(policy)
    report = policy.act([photo, None, photo], INSTRUCTION, state, noise=begun, steps=1)
    length = np.where(own[high] == own[low], 1e-8, own[high].astype(np.float64) - own[low])
    expected = 2 * (state.astype(np.float64) - own[low]) / length - 1
    assert expected[1] == -1
    np.testing.assert_allclose(seen[0]["state"][0, 0, :5], expected, atol=1e-5)
    assert not seen[0]["state"][0, 0, 5:].any()
    own = statistics["action"]
    plain = exported(write_lerobot_checkpoint(source, tmp_path / "plain", {}), tmp_path / "no-statistics")
    assert plain.facts.usual_state == (0.0,) * 6
    raw = plain.act([photo, None, photo], INSTRUCTION, seen[0]["state"][0, 0], noise=begun, steps=1).actions
    assert raw.shape == (5, 4) and report.actions.shape == (5, 3)
    middle, half = (own[high].astype(np.float64) + own[low]) / 2, (own[high].astype(np.float64) - own[low]) / 2
    np.testing.assert_allclose(report.actions, raw[:, :3] * half + middle, atol=1e-4)


def test_mean_and_deviation_of_a_checkpoint_of_lerobot_0_3(source: Path, photo: Image.Image, tmp_path: Path) -> None:
    """Their statistics are tensors of the model, and pictures lie at the right and lower edges of the square."""
    statistics, former = drawn("mean", "std"), tmp_path / "former"
    changes = {"num_steps": 7, "resize_imgs_with_padding": [112, 112], "proj_width": 1024}
    gone = dict.fromkeys(
        ["paligemma_variant", "action_expert_variant", "num_inference_steps", "image_resolution"], "-"
    )
    write_lerobot_checkpoint(source, former, statistics, **changes, **gone)
    for file in former.glob("policy_p*"):
        file.unlink()
    tensors = load_file(former / "model.safetensors")
    for prefix, key in (
        ("normalize_inputs.buffer_observation_state", "observation.state"),
        ("normalize_targets.buffer_action", "action"),
        ("unnormalize_outputs.buffer_action", "action"),
    ):
        tensors |= {f"{prefix}.{name}": values for name, values in statistics[key].items()}
    save_file(tensors, former / "model.safetensors")
    new = exported(write_lerobot_checkpoint(source, tmp_path / "new", statistics), tmp_path / "a")
    old = exported(former, tmp_path / "b")
    assert old.facts.steps == 7
    assert old.facts.state_mean == new.facts.state_mean == tuple(statistics["observation.state"]["mean"].tolist())
    frames, given = [photo.resize((112, 112)), None, None], {"noise": noise(new), "steps": 3}
    chunks = [each.act(frames, INSTRUCTION, STATE, **given).actions for each in (new, old)]
    np.testing.assert_array_equal(*chunks)
    kinds = [each.bundle.manifest.processor["image_processor_type"] for each in (new, old)]
    assert kinds == ["resize_with_pad_torch", "resize_with_pad"]
    assert set(LeRobotSettings.__annotations__) <= new.bundle.manifest.processor.keys()


def test_true_sizes_are_those_of_the_preset() -> None:
    fields = {"type": "pi0", "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
    found = translated_config("hub", {**fields, "image_resolution": [224, 224], "chunk_size": 30})
    assert found == {**PRESETS["pi0"], "chunk_size": 30}


def test_a_configuration_alone_gives_random_weights(source: Path, photo: Image.Image, tmp_path: Path) -> None:
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", {}, chunk_size=3)
    (folder / "model.safetensors").unlink()
    policy = exported(folder / "config.json", tmp_path / "bundle", random_weights=True, max_images=2)
    assert policy.act([photo, None], "go", [0.0] * 6, steps=1).actions.shape == (3, 4)


def test_the_tokenizer_comes_from_another_folder(source: Path, tmp_path: Path, capsys: Any) -> None:
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", drawn("mean", "std"), tokenizer=False)
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json.* --tokenizer google/paligemma-3b-pt-224; or"):
        open_source(ExportRequest(str(folder)))
    pi0_tokenizer().save_pretrained(tmp_path / "tokenizer")
    command = [str(folder), "-o", str(tmp_path / "bundle"), "--budgets", BUDGET]
    assert main([*command, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    own = exported(write_lerobot_checkpoint(source, tmp_path / "with", drawn("mean", "std")), tmp_path / "b")
    written = [(path / "weights" / "tokenizer.json").read_text() for path in (tmp_path / "bundle", tmp_path / "b")]
    assert written[0] == written[1] and own.facts.cameras
    for name in TOKENIZER_FILES:
        (tmp_path / "tokenizer" / name).unlink(missing_ok=True)
    assert main([*command, "--force", "--tokenizer", str(tmp_path / "tokenizer")]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    with pytest.raises(UsageError, match="random weights come with a tokenizer of their own"):
        ExportRequest("pi0", random_weights=True, tokenizer="somewhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "act"}, r"LeRobot's type 'act'\. Supported types: pi0"),
        ({"paligemma_variant": "gemma_9b"}, r"paligemma_variant is 'gemma_9b', expected gemma_2b or gemma_300m"),
        ({"action_expert_variant": "dummy"}, "action_expert_variant is 'dummy'"),
        ({"image_resolution": [112, 224]}, r"image_resolution is \[112, 224\], expected a square"),
        ({"n_obs_steps": 2}, r"n_obs_steps"),
        ({"use_relative_actions": True}, "use_relative_actions is true, expected false"),
        ({"use_peft": True}, "use_peft is true"),
        ({"input_features": {}, "empty_cameras": 0}, "input_features has no camera"),
        (
            {"input_features": {"observation.state": {"type": "STATE", "shape": [99]}}},
            r"has the shape \[99\], expected",
        ),
        ({"output_features": {"action": {"type": "ACTION", "shape": [2, 2]}}}, r"'action' has the shape \[2, 2\]"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"action_expert_variant": "gemma_2b"}, "do not belong together"),
    ],
)
def test_settings_that_cannot_be_read_are_rejected(
    changes: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", drawn("mean", "std"), **changes)
    with pytest.raises(CheckpointError, match=message):
        export_bundle(ExportRequest(str(folder), budgets=(BUDGET,)), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def rewritten(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "policy_preprocessor.json",
            lambda file: file["steps"].append({"registry_name": "clip_processor"}),
            "policy_preprocessor.json has the step 'clip_processor', which is not known",
        ),
        (
            "policy_preprocessor.json",
            lambda file: file["steps"][5]["config"].update(enabled=True),
            "the step 'relative_actions_processor'",
        ),
        (
            "policy_postprocessor.json",
            lambda file: file["steps"][0]["config"].update(eps=1e-3),
            "eps in policy_postprocessor.json is 0.001",
        ),
        (
            "policy_postprocessor.json",
            lambda file: file["steps"][0]["config"]["norm_map"].update(ACTION="LOG"),
            "the actions is normalised by 'LOG', expected IDENTITY, MEAN_STD",
        ),
        (
            "policy_preprocessor.json",
            lambda file: file["steps"][6]["config"]["norm_map"].update(STATE="QUANTILES"),
            r"statistic 'q01' of the state has the shape \[0\].* expected 5 finite numbers for QUANTILES",
        ),
        (
            "policy_preprocessor.json",
            lambda file: file["steps"][6].update(state_file="no.safetensors"),
            "no.safetens",
        ),
        (
            "policy_preprocessor.json",
            lambda file: file["steps"][6].update(state_file="../x"),
            "out of the checkpoint",
        ),
        ("policy_preprocessor.json", lambda file: file.update(steps=3), "malformed"),
    ],
)
def test_pipelines_that_cannot_be_read_are_rejected(
    name: str, change: Callable[[dict[str, Any]], Any], message: str, source: Path, tmp_path: Path
) -> None:
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", drawn("mean", "std"))
    rewritten(folder, name, change)
    with pytest.raises(CheckpointError, match=message):
        open_source(ExportRequest(str(folder)))


def test_statistics_that_are_not_finite_are_rejected(source: Path, tmp_path: Path) -> None:
    statistics = drawn("mean", "std")
    statistics["action"]["std"][2] = np.inf
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", statistics)
    with pytest.raises(CheckpointError, match="statistic 'std' of the actions"):
        open_source(ExportRequest(str(folder)))


def test_cameras_and_prompts_are_those_of_the_training(source: Path, photo: Image.Image, tmp_path: Path) -> None:
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", drawn("mean", "std"))
    with pytest.raises(UsageError, match=r"--max-images is 2, and .* has 3 cameras: observation\.images\.top, "):
        open_source(ExportRequest(str(folder), max_images=2))
    policy = exported(folder, tmp_path / "bundle")
    with pytest.raises(ImageError, match=r"exported for 3 cameras: observation\.images\.top, .*without one\.$"):
        policy.act([photo], INSTRUCTION, STATE)
    with pytest.raises(PromptError, match=r"52 text tokens in the prompt are more than the 48 of the policy's train"):
        policy.act([photo, None, None], "a" * 50, STATE)
    policy.act([photo, None, None], "a" * 46, STATE, steps=1)
    with pytest.raises(SinkpruneError, match="expected 5 numbers as in the policy's training"):
        policy.act([photo, None, None], INSTRUCTION, [1.0])
