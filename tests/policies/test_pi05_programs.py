"""pi0.5 by commands, in LeRobot's form, as engines with the gate, and its FLOPs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from sinkprune import Policy
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import CheckpointError, PromptError
from sinkprune.contract.flops import expert_flops
from sinkprune.engines.profiles import resolve_limits
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest, open_source
from support.models.lerobot_checkpoints import use_small_sizes, write_lerobot_checkpoint
from support.models.manifests import file_of
from support.programs.commands import run
from support.programs.slow_cases import slow
from support.references.pi05 import state_text

Array = np.ndarray[Any, Any]
BUDGET = "prune-77.8"
INSTRUCTION = "pick up the red cup"
STATE = [0.4, -1.2, 0.7, 0.1, -0.9]


@pytest.fixture(scope="module")
def path(bundle: Callable[..., Path]) -> Path:
    """A small policy of two cameras."""
    return bundle("pi0.5", budgets=(BUDGET,), max_images=2)


def test_flops_are_those_of_the_matrices(path: Path) -> None:
    """A chunk's rows through all matrices of a step: what the time conditions has a graph of its own."""
    opened = read_bundle(path)
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


@pytest.mark.parametrize("target", ["onnxruntime", slow("openvino")])
def test_engines_pass_the_gate_and_act(
    target: str, path: Path, photo: Image.Image, photo_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "engines"
    built = run("sinkprune-build", path, "-o", output, "--target", target, "--max-prompt", 80)
    assert built.code == 0, built.stderr
    question = ("--image", photo_file, "--image", photo_file, "--prompt", INSTRUCTION)
    checked = run("sinkprune-check", path, output, *question)
    assert checked.code == 0, checked.stdout + checked.stderr
    engines, graphs = Policy.load(output, compute="fp32" if target == "openvino" else None), Policy.load(path)
    for budget in ("none", BUDGET):
        chunks = [each.act([photo] * 2, INSTRUCTION, STATE, seed=1, budget=budget) for each in (engines, graphs)]
        np.testing.assert_allclose(chunks[0].actions, chunks[1].actions, atol=1e-3)
    with pytest.raises(PromptError, match=r"more than the 80 the engines were built for"):
        engines.act([photo] * 2, INSTRUCTION * 3, STATE)


def test_lerobots_form_gives_the_same_chunks(
    checkpoint: Callable[[str], Path],
    path: Path,
    photo: Image.Image,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames have the tower's size, which neither form resizes, and statistics are quantiles."""
    source = checkpoint("pi0.5")
    use_small_sizes(monkeypatch, source, "pi05")
    settings = json.loads((source / "processor_config.json").read_text())
    statistics = {
        key: {
            name: np.array(settings[f"{own}_{which}"], np.float32)
            for name, which in (("q01", "low"), ("q99", "high"))
        }
        for key, own in (("observation.state", "state"), ("action", "actions"))
    }
    modes = ("QUANTILES", "QUANTILES")
    folder = write_lerobot_checkpoint(
        source, tmp_path / "lerobot", statistics, modes=modes, kind="pi05", empty_cameras=0
    )
    export_bundle(ExportRequest(str(folder), budgets=(BUDGET,)), tmp_path / "bundle")
    lerobot, other = Policy.load(tmp_path / "bundle"), Policy.load(path)
    assert lerobot.bundle.manifest.family == "pi0.5" and lerobot.facts.most_prompt_tokens == 200
    assert (
        resolve_limits(lerobot.bundle.manifest, prompt_tokens=None, new_tokens=None, images=None).prompt_tokens == 200
    )
    ranges = zip(vars_of(lerobot), vars_of(other), strict=True)
    assert all(own == pytest.approx(theirs) for own, theirs in ranges)
    frames = [photo.resize((112, 112)), photo.crop((30, 40, 142, 152))]
    chunks = [one.act(frames, INSTRUCTION, STATE, seed=1, budget=BUDGET) for one in (lerobot, other)]
    np.testing.assert_allclose(chunks[0].actions, chunks[1].actions, atol=1e-6)
    # The small tokenizer has one token for each byte of this text, and BOS.
    text = state_text("a" * 170, [0.0] * 5)
    with pytest.raises(
        PromptError, match=f"{len(text) + 1} text tokens .* more than the 200 of the policy's training"
    ):
        lerobot.act(frames, "a" * 170, [(low + high) / 2 for low, high in zip(*vars_of(lerobot), strict=True)])


def vars_of(policy: Policy) -> tuple[tuple[float, ...], tuple[float, ...]]:
    ranges = policy.facts.state_range
    assert ranges is not None
    return ranges.low, ranges.high


def test_weights_of_pi0_are_rejected(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of pi0.5 by pi0: the tensors that differ are named."""
    for name, kind, tensor in (("pi0", "pi05", "time_mlp_in"), ("pi0.5", "pi0", "action_time_mlp_in")):
        use_small_sizes(monkeypatch, checkpoint(name), kind)
        folder = write_lerobot_checkpoint(checkpoint(name), tmp_path / kind, {}, kind=kind)
        with pytest.raises(CheckpointError, match=rf"holds no tensor '.*({tensor})"):
            export_bundle(ExportRequest(str(folder), budgets=(BUDGET,)), tmp_path / f"{kind}-bundle")
        assert open_source(ExportRequest(str(folder))).max_images == 3
