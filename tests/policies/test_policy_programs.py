"""OpenVLA, OpenVLA-OFT and pi0.5 in programs: what `act` rejects, engines with the gate, deadlines, commands."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from sinkprune import Policy, PolicyLoop
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import CheckpointError, NumericsError, UnusualStateWarning, UsageError
from sinkprune.contract.flops import expert_flops, layer_flops, policy_flops
from sinkprune.contract.policy_facts import NumberRanges
from sinkprune.engines.profiles import resolve_limits
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.checkpoint.presets import PRESETS, small_text
from sinkprune.export.families import read_family
from sinkprune.export.source import ExportRequest, open_source
from sinkprune.policies.observation import observed
from support.models.lerobot_checkpoints import use_small_sizes, write_lerobot_checkpoint
from support.models.manifests import file_of
from support.programs.commands import assert_refused, run, succeed
from support.programs.slow_cases import slow
from support.references.shapes_sent import policy_shapes_outside_optimisation_profiles

Checkpoints = Callable[[str], Path]

INSTRUCTION, BUDGETS = "pick up the red cup", ("prune-77.8",)
STATE = [0.4, -1.2, 0.7, 0.1, -0.9]


@pytest.fixture(scope="module")
def source(bundle: Callable[..., Path]) -> Checkpoints:
    """A small policy of two cameras, or of one."""
    return lambda name: bundle(name, budgets=BUDGETS, max_images=1 if name == "openvla" else 2)


@pytest.fixture(scope="module")
def oft(source: Checkpoints) -> Policy:
    """A policy of two cameras with a state."""
    return Policy.load(source("openvla-oft"))


@pytest.fixture
def frames(photo: Image.Image) -> list[Image.Image]:
    return [photo, photo.rotate(90)]


def test_what_denoising_alone_can_do_is_rejected(oft: Policy, frames: list[Image.Image]) -> None:
    state = oft.facts.usual_state
    for given, said in (
        ({"steps": 4}, "steps is given, and this policy denoises nothing"),
        ({"noise": np.zeros((8, 7))}, "noise is given"),
        ({"held": np.zeros((1, 7))}, "held is given"),
        ({"state": ()}, r"no state was given, expected 8 numbers .* Add it \(--state\)"),
        ({"deadline_ms": 1e4, "min_steps": 2}, "min_steps is 2 and steps 1"),
    ):
        with pytest.raises(UsageError, match=said):
            oft.act(frames, INSTRUCTION, **{"state": state, **given})
    with pytest.raises(UsageError, match=r"join is 'inpaint', .* this policy has none"):
        PolicyLoop(oft, lambda: None, lambda action: None, "go", rate_hz=5, join="inpaint")  # type: ignore[arg-type,return-value]
    first, second = (oft.act(frames, INSTRUCTION, state, seed=seed).actions for seed in (None, 1))
    np.testing.assert_array_equal(first, second)


def test_states_are_clipped_to_the_range_of_the_training(oft: Policy, frames: list[Image.Image]) -> None:
    facts, manifest = oft.facts, oft.bundle.manifest
    assert facts.state_range is not None
    low, high = (np.array(end) for end in (facts.state_range.low, facts.state_range.high))
    for place, expected in ((0.5, 0.0), (0.75, 0.5), (-0.1, -1.0), (1.3, 1.0)):
        state = low + place * (high - low)
        found = observed(manifest, list(frames), INSTRUCTION, state).state
        np.testing.assert_allclose(found[0, 0], expected, atol=1e-5)
    # A joint that never moved in the training.
    still = replace(manifest, policy=replace(facts, state_range=NumberRanges((*low,), (*low,))))
    found = observed(still, list(frames), INSTRUCTION, low).state
    np.testing.assert_array_equal(found[0, 0], -1)
    # What is far outside is noted before it is clipped.
    with pytest.warns(UnusualStateWarning, match="at place 3"):
        oft.act(frames, INSTRUCTION, low + np.eye(8)[2] * 99)


@pytest.mark.parametrize("name", ["openvla-oft", "openvla"])
def test_every_shape_lies_in_an_optimisation_profile(
    name: str, source: Checkpoints, frames: list[Image.Image]
) -> None:
    opened = read_bundle(source(name))
    policy, seen = Policy.load(opened), frames[: opened.manifest.max_images]
    most = policy.act(seen, INSTRUCTION, policy.facts.usual_state).prompt_tokens
    limits, tighter = (
        resolve_limits(opened.manifest, prompt_tokens=tokens, new_tokens=None, images=None)
        for tokens in (most, most - 1)
    )
    assert limits.new_tokens == policy.facts.new_tokens == (0 if "oft" in name else 7)
    assert not policy_shapes_outside_optimisation_profiles(opened, limits, [(seen, INSTRUCTION)])
    outside = policy_shapes_outside_optimisation_profiles(opened, tighter, [(seen, INSTRUCTION)])
    assert {graph for graph, _ in outside} >= {"decoder_0"}
    # Short instructions have room by default, with the rows that are no text.
    usual = resolve_limits(opened.manifest, prompt_tokens=None, new_tokens=None, images=None)
    assert usual.prompt_tokens == 64 + (58 if "oft" in name else 0)


@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "onnxruntime") for name in ("openvla-oft", "openvla", "pi0.5")), slow(("pi0.5", "openvino"))],
)
def test_engines_pass_the_gate_and_act_as_the_graphs(
    name: str, target: str, source: Checkpoints, frames: list[Image.Image], photo_file: Path, tmp_path: Path
) -> None:
    engines, bundle = tmp_path / "engines", source(name)
    most = 80 if name == "pi0.5" else 160
    succeed("sinkprune-build", bundle, "-o", engines, "--target", target, "--max-prompt", most)
    checked = run("sinkprune-check", bundle, engines, "--image", photo_file, "--prompt", INSTRUCTION)
    assert checked.code == 0, checked.stdout + checked.stderr
    assert f"passed: {len(read_bundle(bundle).manifest.graphs)} engines, 2 chunks of actions" in checked.stdout
    policies = Policy.load(engines, compute="fp32" if target == "openvino" else None), Policy.load(bundle)
    seen = frames[: policies[0].bundle.manifest.max_images]
    state = STATE if name == "pi0.5" else policies[0].facts.usual_state
    for budget in ("none", *BUDGETS):
        chunks = [each.act(seen, INSTRUCTION, state, budget=budget, seed=1).actions for each in policies]
        assert abs(chunks[0] - chunks[1]).max() < (1e-3 if name == "pi0.5" else 1e-4)


@pytest.mark.parametrize("name", ["openvla-oft", "openvla"])
def test_a_deadline_chooses_a_budget(name: str, source: Checkpoints, frames: list[Image.Image]) -> None:
    policy = Policy.load(source(name))
    seen, state = frames[: policy.bundle.manifest.max_images], policy.facts.usual_state
    policy.warm_up(seen, INSTRUCTION, state, seconds=0)
    for deadline, budget in ((6e4, "none"), (1, BUDGETS[0])):
        chunk = policy.act(seen, INSTRUCTION, state, deadline_ms=deadline)
        assert chunk.deadline is not None
        assert (chunk.steps, chunk.deadline.steps, chunk.deadline.met) == (1, 1, budget == "none")
    assert chunk.budget in ("none", BUDGETS[0])


def test_commands_act_and_profile(source: Checkpoints, photo_file: Path) -> None:
    cameras = ("--camera", photo_file, "--camera", photo_file, "--instruction", INSTRUCTION)
    done = succeed("sinkprune-act", source("openvla-oft-stateless"), *cameras, "--budget", BUDGETS[0], "--json")
    (chunk,) = json.loads(done.stdout)["chunks"]
    assert (len(chunk["actions"]), chunk["steps"]) == (8, 1)
    options = ("--camera", photo_file, "--prompt", INSTRUCTION, "--repeat", 1, "--warmup", 0, "--json")
    assert_refused(run("sinkprune-profile", source("openvla"), "--steps", "2", *options), "steps is given")
    done = succeed("sinkprune-profile", source("openvla"), *options)
    assert set(json.loads(done.stdout)["budgets"]) == {"none", *BUDGETS}


def test_actions_that_end_early_or_are_not_finite_are_errors(source: Checkpoints, photo: Image.Image) -> None:
    """The original decodes tokens of the prompt as numbers then."""
    policy, calls = Policy.load(source("openvla")), list[int]()
    head = policy._model.chain.last

    def ends(inputs: Any) -> Any:
        logits = np.array(policy.backend.numpy(head(inputs)["logits"]))
        calls.append(int(logits.argmax()))
        if len(calls) == 3:
            logits[0, 2] = logits.max() + 1
        if len(calls) == 4:
            logits[0, 5] = np.nan
        return {"logits": policy.backend.tensor(logits)}

    policy._model.chain.last = ends
    for said in ("ended its answer after 2 of 7 tokens", "logits are not finite"):
        with pytest.raises(NumericsError, match=said):
            policy.act([photo], INSTRUCTION)


def test_flops_are_of_the_rows_that_ran(oft: Policy, frames: list[Image.Image]) -> None:
    manifest, report = oft.bundle.manifest, oft.act(frames, INSTRUCTION, oft.facts.usual_state, budget=BUDGETS[0])
    rows = [report.prompt_tokens + count for count in report.tokens_per_layer]
    # 8 actions of 7 rows: a layer of 7 widths, two of one, and one to 7 numbers. The state: 8 numbers to a row.
    head = 2 * (8 * (7 * 64 * 64 + 2 * 64 * 64 + 64 * 7) + 8 * 64 + 64 * 64)
    layers = sum(layer_flops(manifest.language_model, one) for one in rows)
    assert policy_flops(manifest, rows) == (report.flops.prefix, report.flops.expert) == (layers, head)


def test_flops_of_pi05_are_those_of_the_matrices(source: Checkpoints) -> None:
    """A chunk's rows through all matrices of a step: what the time conditions has a graph of its own."""
    opened = read_bundle(source("pi0.5"))
    facts = opened.manifest.policy
    assert facts is not None
    rows, cached = facts.chunk, [100, 70, *[30] * 6]
    expected = 0
    for weight in onnx.load(file_of(opened, "expert"), load_external_data=False).graph.initializer:
        assert ".dense" not in weight.name and "time_mlp" not in weight.name
        if len(weight.dims) == 2:
            expected += 2 * rows * weight.dims[0] * weight.dims[1]
    # Scores and mixed values, of heads of 16.
    expected += sum(2 * 2 * rows * (rows + count) * facts.expert.num_heads * 16 for count in cached)
    assert expert_flops(facts, cached) == expected


@pytest.mark.parametrize("options", [{"precision": "fp16", "dialect": "opset20"}, {"weights": "int4"}])
def test_every_form_of_weights_acts(
    options: dict[str, Any], oft: Policy, bundle: Callable[..., Path], frames: list[Image.Image]
) -> None:
    """Rounding moves the chunk of random weights, and turns it into no other."""
    other = Policy.load(bundle("openvla-oft", budgets=BUDGETS, max_images=2, **options))
    exact, found = (each.act(frames, INSTRUCTION, oft.facts.usual_state).actions for each in (oft, other))
    assert 0 < abs(exact - found).mean() < (1.0 if "weights" in options else 0.05) * abs(exact).mean()
    assert np.corrcoef(exact.ravel(), found.ravel())[0, 1] > 0.7


def test_lerobots_form_gives_the_same_chunks(
    checkpoint: Checkpoints, source: Checkpoints, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames have the tower's size, which neither form resizes, and statistics are quantiles."""
    original = checkpoint("pi0.5")
    use_small_sizes(monkeypatch, original, "pi05")
    settings = json.loads((original / "processor_config.json").read_text())
    statistics = {
        key: {
            name: np.array(settings[f"{own}_{which}"], np.float32)
            for name, which in (("q01", "low"), ("q99", "high"))
        }
        for key, own in (("observation.state", "state"), ("action", "actions"))
    }
    modes = ("QUANTILES", "QUANTILES")
    folder = write_lerobot_checkpoint(
        original, tmp_path / "lerobot", statistics, modes=modes, kind="pi05", empty_cameras=0
    )
    export_bundle(ExportRequest(str(folder), budgets=BUDGETS), tmp_path / "bundle")
    lerobot, other = Policy.load(tmp_path / "bundle"), Policy.load(source("pi0.5"))
    assert lerobot.bundle.manifest.family == "pi0.5" and lerobot.facts.most_prompt_tokens == 200
    own, theirs = lerobot.facts.state_range, other.facts.state_range
    assert own is not None and theirs is not None
    assert (*own.low, *own.high) == pytest.approx((*theirs.low, *theirs.high))
    frames = [photo.resize((112, 112)), photo.crop((30, 40, 142, 152))]
    chunks = [one.act(frames, INSTRUCTION, STATE, seed=1, budget=BUDGETS[0]) for one in (lerobot, other)]
    np.testing.assert_allclose(chunks[0].actions, chunks[1].actions, atol=1e-6)


def test_weights_of_pi0_are_rejected(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of pi0.5 by pi0: the tensors that differ are named."""
    for name, kind, tensor in (("pi0", "pi05", "time_mlp_in"), ("pi0.5", "pi0", "action_time_mlp_in")):
        use_small_sizes(monkeypatch, checkpoint(name), kind)
        folder = write_lerobot_checkpoint(checkpoint(name), tmp_path / kind, {}, kind=kind)
        with pytest.raises(CheckpointError, match=rf"holds no tensor '.*({tensor})"):
            export_bundle(ExportRequest(str(folder), budgets=BUDGETS), tmp_path / f"{kind}-bundle")
        assert open_source(ExportRequest(str(folder))).max_images == 3


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


def test_a_preset_acts(photo: Image.Image, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(narrow(PRESETS["pi0"])))
    options = ("--max-images", 3, "--budgets", BUDGETS[0], "-o", tmp_path / "policy")
    succeed("sinkprune-export", tmp_path, "--random-weights", *options)
    cameras = [photo, photo.rotate(90), photo.crop((0, 0, 90, 50))]
    report = Policy.load(tmp_path / "policy").act(cameras, INSTRUCTION, [0.1] * 32, budget=BUDGETS[0], seed=0)
    assert report.actions.shape == (50, 32) and np.isfinite(report.actions).all()
    assert (report.visual_tokens, report.steps, len(report.tokens_per_layer)) == (3 * 256, 10, 18)


def test_the_tokenizer_of_random_weights_has_the_image_token() -> None:
    """As the token after the vocabulary, and inside it, and not in the place of another."""
    config = narrow(PRESETS["pi0"])
    for image in (400, 399, 2):
        config["vlm_config"]["image_token_id"] = image
        family = read_family("narrow", config)
        if image == 2:
            with pytest.raises(CheckpointError, match="expected 5 different ones below 400"):
                family.special_tokens  # noqa: B018
            continue
        made = json.loads(small_text(400, family.special_tokens, family.chat_template).tokenizer_json)
        added = {token["id"]: token["content"] for token in made["added_tokens"]}
        assert added == {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", image: "<image>"}
