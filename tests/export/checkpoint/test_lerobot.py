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
from sinkprune.contract.errors import CheckpointError, ImageError, PromptError, UnitsWarning, UsageError
from sinkprune.engines.profiles import resolve_limits
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.checkpoint.lerobot import translated_files
from sinkprune.export.command import main
from sinkprune.export.source import ExportRequest, open_source
from sinkprune.runtime.families.policies import LeRobotSettings
from support.models.lerobot_checkpoints import (
    CAMERAS,
    EMPTY,
    TOKENIZER_FILES,
    use_small_sizes,
    write_lerobot_checkpoint,
)
from support.models.pi0_checkpoints import pi0_tokenizer
from support.programs.commands import run
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


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """It in LeRobot's form, to be changed."""
    return write_lerobot_checkpoint(source, tmp_path / "lerobot", drawn("mean", "std"))


def exported(folder: Path, output: Path, **options: Any) -> Policy:
    export_bundle(ExportRequest(str(folder), budgets=(BUDGET,), **options), output)
    return Policy.load(output)


def noise(policy: Policy) -> Array:
    shape = policy.facts.chunk, policy.facts.action_dim
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def expert_states(policy: Policy) -> list[Array]:
    """The state of each call of the expert from now on."""
    seen: list[Array] = []
    chain = policy._model.chain
    last = chain.last

    def recorded(inputs: Any) -> Any:
        seen.append(np.array(chain.backend.numpy(inputs["state"]))[0, 0])
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
    limits = resolve_limits(lerobot.bundle.manifest, prompt_tokens=None, new_tokens=None, images=None)
    assert lerobot.facts.most_prompt_tokens == limits.prompt_tokens == 48


@pytest.mark.parametrize(
    ("mode", "low", "high"), [("QUANTILES", "q01", "q99"), ("MIN_MAX", "min", "max"), ("QUANTILE10", "q10", "q90")]
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
    seen, own = expert_states(policy), statistics["observation.state"]
    state = np.array(STATE, np.float32)
    state[1] = own[low][1]
    begun = noise(policy)
    report = policy.act([photo, None, photo], INSTRUCTION, state, noise=begun, steps=1)
    length = np.where(own[high] == own[low], 1e-8, own[high].astype(np.float64) - own[low])
    expected = 2 * (state.astype(np.float64) - own[low]) / length - 1
    assert expected[1] == -1
    np.testing.assert_allclose(seen[0][:5], expected, atol=1e-5)
    assert not seen[0][5:].any()
    own = statistics["action"]
    plain = exported(write_lerobot_checkpoint(source, tmp_path / "plain", {}), tmp_path / "no-statistics")
    assert plain.facts.usual_state == (0.0,) * 6
    raw = plain.act([photo, None, photo], INSTRUCTION, seen[0], noise=begun, steps=1).actions
    assert raw.shape == (5, 4) and report.actions.shape == (5, 3)
    middle, half = (own[high].astype(np.float64) + own[low]) / 2, (own[high].astype(np.float64) - own[low]) / 2
    np.testing.assert_allclose(report.actions, raw[:, :3] * half + middle, atol=1e-4)


def test_mean_and_deviation_of_a_checkpoint_of_lerobot_0_3(
    source: Path, folder: Path, photo: Image.Image, tmp_path: Path
) -> None:
    """Their statistics are tensors of the model, in any shard. Their embedding table is the head, with transformers
    before 4.52. Pictures lie at the right and lower edges of the square.
    """
    statistics, former = drawn("mean", "std"), tmp_path / "former"
    changes = {"num_steps": 7, "resize_imgs_with_padding": [112, 112], "proj_width": 1024}
    gone = ("paligemma_variant", "action_expert_variant", "num_inference_steps", "image_resolution")
    write_lerobot_checkpoint(source, former, statistics, **changes, **dict.fromkeys(gone, "-"))
    for file in former.glob("policy_p*"):
        file.unlink()
    tensors = load_file(former / "model.safetensors")
    for prefix, key in (
        ("normalize_inputs.buffer_observation_state", "observation.state"),
        ("normalize_targets.buffer_action", "action"),
        ("unnormalize_outputs.buffer_action", "action"),
    ):
        tensors |= {f"{prefix}.{name}": values for name, values in statistics[key].items()}
    head = "model.paligemma_with_expert.paligemma."
    tensors[f"{head}language_model.lm_head.weight"] = tensors.pop(f"{head}lm_head.weight")
    (former / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + name.startswith('model.')}-of-00002.safetensors" for name in tensors}
    for shard in {*shards.values()}:
        save_file({name: values for name, values in tensors.items() if shards[name] == shard}, former / shard)
    (former / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    new, old = exported(folder, tmp_path / "a"), exported(former, tmp_path / "b")
    assert old.facts.steps == 7
    assert old.facts.state_mean == new.facts.state_mean == tuple(statistics["observation.state"]["mean"].tolist())
    frames, given = [photo.resize((112, 112)), None, None], {"noise": noise(new), "steps": 3}
    chunks = [each.act(frames, INSTRUCTION, STATE, **given).actions for each in (new, old)]
    np.testing.assert_array_equal(*chunks)
    kinds = [each.bundle.manifest.processor["image_processor_type"] for each in (new, old)]
    assert kinds == ["resize_with_pad_torch", "resize_with_pad"]
    assert set(LeRobotSettings.__annotations__) <= new.bundle.manifest.processor.keys()


def test_the_tokenizer_comes_from_another_folder(source: Path, tmp_path: Path, capsys: Any) -> None:
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", drawn("mean", "std"), tokenizer=False)
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json.* --tokenizer google/paligemma-3b-pt-224; or"):
        open_source(ExportRequest(str(folder)))
    rewritten(folder, *before(configured(3, tokenizer_name="models/paligemma")))
    with pytest.raises(CheckpointError, match=r"--tokenizer models/paligemma; or"):
        open_source(ExportRequest(str(folder)))
    pi0_tokenizer().save_pretrained(tmp_path / "tokenizer")
    command = [str(folder), "-o", str(tmp_path / "bundle"), "--budgets", BUDGET]
    assert main([*command, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert Policy.load(tmp_path / "bundle").facts.cameras
    for name in TOKENIZER_FILES:
        (tmp_path / "tokenizer" / name).unlink(missing_ok=True)
    assert main([*command, "--force", "--tokenizer", str(tmp_path / "tokenizer")]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    with pytest.raises(UsageError, match="random weights come with a tokenizer of their own"):
        ExportRequest("pi0", random_weights=True, tokenizer="somewhere")


def test_the_tokenizer_is_an_artifact_of_the_pipeline(source: Path, tmp_path: Path) -> None:
    """As LeRobot after 0.6 saves it."""
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", drawn("mean", "std"), tokenizer=False)
    saved = {"tokenizer_name": "tokenizer"}
    rewritten(folder, *before(lambda steps: steps[3].update(config={**steps[3]["config"], **saved}, artifacts=saved)))
    with pytest.raises(CheckpointError, match=r"lerobot/tokenizer' has no tokenizer\.json"):
        open_source(ExportRequest(str(folder)))
    pi0_tokenizer().save_pretrained(folder / "tokenizer")
    open_source(ExportRequest(str(folder))).weights.close()
    (tmp_path / "tokenizer").mkdir()
    rewritten(folder, *before(configured(3, tokenizer_name="../tokenizer")))
    with pytest.raises(CheckpointError, match="leads out of the checkpoint folder"):
        open_source(ExportRequest(str(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "act"}, r"LeRobot's type 'act'\. Supported types: pi0"),
        ({"paligemma_variant": "gemma_9b"}, r"paligemma_variant is 'gemma_9b', expected gemma_2b or gemma_300m"),
        ({"image_resolution": [112, 224]}, r"image_resolution is \[112, 224\], expected a square"),
        ({"use_relative_actions": True}, "use_relative_actions of config.json, 'relative_.*'absolute_.* differ, exp"),
        ({"rtc_training_max_delay": 2}, "rtc_training_max_delay is below chunk_size, and 0 in pi0; found 2"),
        ({"rtc_config": {"execution_horizon": 10}}, "rtc_config is enabled.* Write null as rtc_config"),
        ({"normalization_mapping": {"VISUAL": "LOG"}}, "config.json normalises VISUAL by 'LOG'"),
        ({"input_features": {}, "empty_cameras": 0}, "names no cameras, because input_features .* lerobot/pi0_base"),
        ({"input_features": {"observation.state": {"type": "STATE", "shape": [99]}}}, r"has the shape \[99\], exp"),
        ({"action_expert_variant": "gemma_2b"}, "do not belong together"),
    ],
)
def test_settings_that_cannot_be_read_are_rejected(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    rewritten(folder, "config.json", lambda config: config.update(changes))
    with pytest.raises(CheckpointError, match=message):
        export_bundle(ExportRequest(str(folder), budgets=(BUDGET,)), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def translated(folder: Path) -> dict[str, Any]:
    """The processor_config.json of transformers' form."""
    config = json.loads((folder / "config.json").read_text())
    return translated_files("hub", folder, config)["processor_config.json"]


def rewritten(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def before(change: Callable[[Any], Any]) -> tuple[str, Callable[[Any], Any]]:
    """A change of the steps before the model, whose last one normalises."""
    return "policy_preprocessor.json", lambda file: change(file["steps"])


def after(change: Callable[[Any], Any]) -> tuple[str, Callable[[Any], Any]]:
    """A change of the steps after the model, whose first one normalises."""
    return "policy_postprocessor.json", lambda file: change(file["steps"])


def configured(place: int, **changes: Any) -> Callable[[Any], Any]:
    return lambda steps: steps[place]["config"].update(changes)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (before(lambda steps: steps.append({"registry_name": "clip"})), r"json has the step 'clip', which is not k"),
        (before(lambda steps: steps.append(steps[6])), "has the step 'normalizer_processor' twice"),
        (before(lambda steps: steps.insert(0, steps.pop())), "another order than rename_observations_processor, no"),
        (before(lambda steps: steps.pop(2)), "has no step 'pi0_new_line_processor'"),
        (
            before(configured(2, times=2)),
            "'pi0_new_line_processor' in .* has the setting 'times', which is not known",
        ),
        (before(configured(3, padding_side="left")), "'padding_side' 'left', expected 'right'"),
        (before(configured(5, enabled=True)), "'relative_actions_processor' in .*'absolute_actions_.* differ"),
        (after(configured(1, enabled=True)), "'relative_actions_processor' in .*'absolute_actions_.* differ"),
        (before(lambda steps: steps.append({**steps.pop(5), "config": {"enabled": True}})), "another order than ren"),
        (
            after(lambda steps: steps.insert(0, {**steps.pop(1), "config": {"enabled": True}})),
            "another order than un",
        ),
        (after(configured(0, eps=1e-3)), "in policy_postprocessor.json has the setting 'eps' 0.001, expected 1e-08"),
        (after(configured(0, norm_map={"ACTION": "LOG"})), "normalises ACTION by 'LOG', expected STATE, VIS"),
        (after(lambda steps: steps[0]["config"].pop("norm_map")), "'unnormalizer_processor' in .* has no norm_map"),
        (before(configured(6, norm_map={"STATE": "QUANTILES"})), r"'q01' and 'q99' of the state have the shapes \[0"),
        (before(lambda steps: steps[6].update(state_file="no.safetensors")), "no.safetensors' is missing"),
        (before(lambda steps: steps[6].update(state_file="../x")), "out of the checkpoint"),
        (before(configured(0, rename_map={"a": CAMERAS[0], "b": CAMERAS[0]})), "has the names a, b for .*top'"),
        (before(configured(0, rename_map={"observation.state": "a"})), "has no name for 'observation.state'"),
    ],
)
def test_pipelines_that_cannot_be_read_are_rejected(
    file: tuple[str, Callable[[Any], Any]], message: str, folder: Path
) -> None:
    rewritten(folder, *file)
    with pytest.raises(CheckpointError, match=message):
        translated(folder)


@pytest.mark.parametrize(
    ("excluded", "names", "relative"),
    [
        (["gripper"], ["Shoulder.pos", "elbow.pos", "Gripper.pos"], [True, True, False]),
        (["ELBOW", ""], ["shoulder.pos", "elbow.pos"], [True, False, True]),
        (["pos"], ["a.pos", "b.pos", "c.pos"], None),
        (["gripper"], None, [True] * 3),
    ],
)
def test_relative_actions_are_read(
    excluded: list[str], names: list[str] | None, relative: list[bool] | None, folder: Path
) -> None:
    plain = translated(folder)
    rewritten(folder, "config.json", lambda config: config.update(use_relative_actions=True))
    rewritten(folder, *before(configured(5, enabled=True, exclude_joints=excluded, action_names=names)))
    rewritten(folder, *after(configured(1, enabled=True)))
    found = translated(folder)
    assert found.pop("actions_relative", None) == relative
    assert found == plain


def test_relative_actions_have_numbers_of_the_state(source: Path, tmp_path: Path) -> None:
    statistics = drawn("mean", "std")
    statistics["observation.state"] = {name: own[:2] for name, own in statistics["observation.state"].items()}
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", statistics)
    rewritten(folder, *before(configured(5, enabled=True)))
    rewritten(folder, *after(configured(1, enabled=True)))
    with pytest.raises(CheckpointError, match="found 3 values, 3 numbers of an action and 2 of the state"):
        open_source(ExportRequest(str(folder)))


def test_the_state_of_pi05_is_normalised_before_it_is_text(source: Path, tmp_path: Path) -> None:
    changes = {"kind": "pi05", "rtc_training_max_delay": 4}
    folder = write_lerobot_checkpoint(source, tmp_path / "lerobot", drawn("mean", "std"), **changes)
    translated(folder)
    config = json.loads((folder / "config.json").read_text())
    assert translated_files("hub", folder, config)["config.json"]["rtc_training_max_delay"] == 4
    rewritten(folder, *before(lambda steps: steps.append(steps.pop(2))))
    with pytest.raises(CheckpointError, match="another order than rename_observations_processor, normalizer_process"):
        translated(folder)


def saved(folder: Path, change: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
    """Change the statistics of both pipelines."""
    for file in folder.glob("policy_p*.safetensors"):
        save_file(change(load_file(file)), file)


def test_statistics_broadcast_or_are_rejected(folder: Path) -> None:
    statistics = drawn("mean", "std")["action"]
    std = statistics["std"]
    for values in (std[None], std.astype(np.float16), np.array([0.5], np.float32)):
        saved(folder, lambda tensors, values=values: {**tensors, "action.std": np.ascontiguousarray(values)})
        found = translated(folder)
        np.testing.assert_array_equal(found["actions_std"], np.broadcast_to(np.float32(values).reshape(-1), 3))
        np.testing.assert_array_equal(found["actions_mean"], statistics["mean"])
    for values, message in (
        (np.array([1, np.inf, 1], np.float32), "'mean' and 'std' of the actions are not all finite, expected 3"),
        (np.ones(2, np.float32), r"have the shapes \[3\] and \[2\], expected 3 finite numbers each for MEAN_STD"),
        (np.ones((5, 3), np.float32), r"have the shapes \[3\] and \[5, 3\]"),
        (np.ones(4097, np.float32), r"statistic 'action.std' has the shape \[4097\], expected at most 4096"),
    ):
        saved(folder, lambda tensors, values=values: {**tensors, "action.std": values})
        with pytest.raises(CheckpointError, match=message):
            translated(folder)


@pytest.mark.parametrize(
    ("changes", "name", "missing"),
    [
        ({}, "policy_preprocessor.json", "policy_preprocessor.json"),
        ({}, "policy_p*.json", "policy_preprocessor.json"),
        # LeRobot 0.3, whose weights may have the statistics
        ({"resize_imgs_with_padding": [112, 112]}, "policy_postprocessor.json", "policy_postprocessor.json"),
        ({"resize_imgs_with_padding": [112, 112]}, "policy_p*.json", "normalize_inputs.buffer_observation_state"),
    ],
)
def test_pipelines_that_are_missing_are_named(changes: dict[str, Any], name: str, missing: str, folder: Path) -> None:
    rewritten(folder, "config.json", lambda config: config.update(changes))
    for file in folder.glob(name):
        file.unlink()
    with pytest.raises(CheckpointError, match=missing):
        translated(folder)


CAMERA = {f"{CAMERAS[0]}.{name}": np.full((3, 1, 1), 0.5, np.float32) for name in ("mean", "std", "min", "max")}


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX"])
def test_normalised_frames_are_rejected(mode: str, folder: Path) -> None:
    """Where LeRobot would normalise them: not without statistics, and not if the step leaves observations out."""
    modes = {"VISUAL": mode, "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    rewritten(folder, *before(configured(6, norm_map=modes)))
    plain = translated(folder)
    saved(folder, lambda tensors: {**tensors, **CAMERA})
    with pytest.raises(CheckpointError, match=f"the frames of '{CAMERAS[0]}' are normalised by '{mode}', expected"):
        translated(folder)
    rewritten(folder, *before(configured(6, normalize_observation_keys=["observation.state"])))
    assert translated(folder) == plain


def test_cameras_have_the_robot_s_names(folder: Path) -> None:
    for renaming, names in (
        ({"observation.images.front": CAMERAS[0]}, ["observation.images.front", CAMERAS[1], EMPTY]),
        ({CAMERAS[0]: CAMERAS[1], CAMERAS[1]: CAMERAS[0]}, [CAMERAS[1], CAMERAS[0], EMPTY]),
        ({"joints": "observation.state", "observation.images.a": "unused"}, [*CAMERAS, EMPTY]),
    ):
        rewritten(folder, *before(configured(0, rename_map=renaming)))
        assert translated(folder)["cameras"] == names


@pytest.mark.parametrize("lost", ["names", "steps"])
def test_without_statistics_actions_are_normalised_aloud(
    lost: str, folder: Path, photo_file: Path, tmp_path: Path, capsys: Any
) -> None:
    """As base checkpoints are published, and where LeRobot finds none under its own names."""
    if lost == "names":
        saved(folder, lambda tensors: {f"so100.buffer.{name}": own for name, own in tensors.items()})
    else:
        rewritten(folder, *before(lambda steps: steps.pop()))
        rewritten(folder, *after(lambda steps: steps.pop(0)))
    assert main([str(folder), "-o", str(tmp_path / "bundle"), "--budgets", BUDGET, "--json"]) == 0
    said = "the checkpoint has no statistics of states and actions, so states and actions are normalised numbers"
    printed = capsys.readouterr()
    assert f"warning: {said}" in printed.err and json.loads(printed.out)["in_robots_units"] is False
    policy = Policy.load(tmp_path / "bundle")
    assert not policy.facts.in_robots_units and len(policy.facts.usual_state) == 5
    with pytest.warns(UnitsWarning, match=said):
        report = policy.act([photo_file, None, None], INSTRUCTION, STATE, steps=1)
    assert report.actions.shape == (5, 3) and report.as_json()["in_robots_units"] is False
    words = ("--camera", photo_file, *("--camera", "none") * 2, "--instruction", "go", "--state", "1,2,3,4,5")
    outcome = run("sinkprune-act", tmp_path / "bundle", *words, "--steps", 1, "--json")
    assert outcome.code == 0 and said in outcome.stderr
    assert json.loads(outcome.stdout)["notes"] == [policy.facts.units_note]


def test_cameras_and_prompts_are_those_of_the_training(folder: Path, photo: Image.Image, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--max-images is 2, and .* has 3 cameras: observation\.images\.top, "):
        open_source(ExportRequest(str(folder), max_images=2))
    policy = exported(folder, tmp_path / "bundle")
    with pytest.raises(ImageError, match=r"exported for 3 cameras: observation\.images\.top, .*without one\.$"):
        policy.act([photo], INSTRUCTION, STATE)
    with pytest.raises(PromptError, match=r"52 text tokens in the prompt are more than the 48 of the policy's train"):
        policy.act([photo, None, None], "a" * 50, STATE)
    policy.act([photo, None, None], "a" * 46, STATE, steps=1)
