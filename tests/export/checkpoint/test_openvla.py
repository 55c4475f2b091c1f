"""Folders of OpenVLA and OpenVLA-OFT: what is read of them, and what is rejected by name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sinkprune.contract.errors import CheckpointError, SinkpruneError, UsageError
from sinkprune.export.checkpoint.openvla import read_openvla
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.checkpoint.torch_file import TorchFile
from sinkprune.export.families import read_family
from sinkprune.export.source import ExportRequest, OpenCheckpoint, open_source
from support.models.small_models import OPENVLA_SHAPES
from support.programs.commands import assert_refused, run

HEAD, STATE = "action_head--150000_checkpoint.pt", "proprio_projector--150000_checkpoint.pt"


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A small checkpoint of OpenVLA-OFT that a test may change. Its shards are links."""
    made = tmp_path / "oft"
    shutil.copytree(checkpoint("openvla-oft"), made, copy_function=os.link)
    return made


def opened(folder: Path, **options: Any) -> OpenCheckpoint:
    found = open_source(ExportRequest(str(folder), **options))
    found.weights.close()
    return found


def written(path: Path, content: Any) -> None:
    """Replace a file, which may be a link to a shared one."""
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(content))


def with_statistics(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "dataset_statistics.json"
    content = json.loads(path.read_text())
    change(content)
    written(path, content)


def with_settings(folder: Path, name: str, **settings: Any) -> None:
    written(folder / name, {**json.loads((folder / name).read_text()), **settings})


def with_head(folder: Path, renamed: Callable[[str], str] = str, **changes: torch.Tensor) -> None:
    """Rename or replace tensors of the action head."""
    tensors = {**torch.load(folder / HEAD, weights_only=True), **changes}
    (folder / HEAD).unlink()
    torch.save({renamed(name): value for name, value in tensors.items()}, folder / HEAD)


def test_a_folder_has_the_facts_of_its_files(folder: Path) -> None:
    statistics = json.loads((folder / "dataset_statistics.json").read_text())["libero_spatial_no_noops"]
    found = opened(folder)
    facts = found.policy
    assert facts is not None and facts.rows is not None and facts.action_range and facts.state_range
    assert (facts.chunk, facts.action_dim, facts.state_dim, facts.rows.head_blocks) == (8, 7, 8, 2)
    # The mask leaves the gripper, the last number, as the network gives it.
    assert facts.action_range.low == (*statistics["action"]["q01"][:6], -1.0)
    assert facts.action_range.high == (*statistics["action"]["q99"][:6], 1.0)
    assert facts.state_range.low == tuple(statistics["proprio"]["q01"])
    # The rounded numbers of `tvf_normalize_params` are those that the original computes with.
    assert found.processor["image_mean"] == [0.484375, 0.455078125, 0.40625]
    assert found.processor["second_std"] == [0.5] * 3
    with_settings(folder, "tokenizer_config.json", chat_template="{{ messages }}")
    assert "What action should the robot take" in opened(folder).text.chat_template


def test_the_data_set_is_chosen_by_its_key(folder: Path) -> None:
    with_statistics(folder, lambda every: every.update(other={**every["libero_spatial_no_noops"], "proprio": None}))
    with pytest.raises(UsageError, match=r"has 2 data sets, and none was chosen\. Add --unnorm-key with one of: lib"):
        opened(folder)
    with pytest.raises(UsageError, match=r"has no data set 'bridge'.* libero_spatial_no_noops, other"):
        opened(folder, unnorm_key="bridge")
    assert opened(folder, unnorm_key="libero_spatial_no_noops").policy is not None
    # Statistics in their own file replace those of config.json, which has a data set of that name.
    (folder / "dataset_statistics.json").unlink()
    with pytest.raises(CheckpointError, match="have 0 values q01"):
        opened(folder, chunk=8, bounds="q01-q99")


def test_a_robot_that_no_length_names_needs_options(folder: Path) -> None:
    def shorten(every: dict[str, Any]) -> None:
        (own,) = every.values()
        own["proprio"] = {end: values[:6] for end, values in own["proprio"].items()}

    with_statistics(folder, shorten)
    with pytest.raises(UsageError, match=r"7 numbers of an action and 6 of a state.*--chunk N and --bounds q01-q99"):
        opened(folder)
    with pytest.raises(CheckpointError, match=r"6 numbers of state, expected 8 by its \.pt files"):
        opened(folder, chunk=3, bounds="min-max")
    (folder / STATE).unlink()
    facts = opened(folder, chunk=3, bounds="min-max").policy
    assert facts is not None and facts.action_range
    (own,) = json.loads((folder / "dataset_statistics.json").read_text()).values()
    assert (facts.chunk, facts.state_dim, facts.state_range) == (3, 0, None)
    assert facts.action_range.high[:6] == tuple(own["action"]["max"][:6])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "vision_backbone--150000_checkpoint.pt").touch(), "instruction modulates .FiLM"),
        (lambda folder: (folder / "noisy_action_projector--1_checkpoint.pt").touch(), "is of a diffusion head"),
        (
            lambda folder: (folder / HEAD).unlink(),
            r"decodes all tokens of its actions at once\. Discrete OpenVLA-OFT",
        ),
        (lambda folder: (folder / "action_head--9_checkpoint.pt").touch(), "2 files of the part action_head"),
        (lambda folder: with_statistics(folder, dict.clear), "no dataset_statistics.json, and config.json no norm"),
        (
            lambda folder: with_settings(folder, "config.json", vision_backbone_id="siglip-vit-so400m"),
            "siglip-vit-so",
        ),
        (lambda folder: with_settings(folder, "config.json", image_resize_strategy="letterbox"), "'letterbox'"),
        (lambda folder: with_settings(folder, "config.json", arch_specifier="linear"), "arch_specifier is 'linear'"),
        (lambda folder: with_settings(folder, "preprocessor_config.json", tvf_do_letterbox=True), "tvf_do_letterbox"),
        (lambda folder: with_head(folder, lambda name: f"noise_predictor.mlp_resnet.{name}"), "is a diffusion head"),
    ],
)
def test_variants_are_rejected_by_name(change: Callable[[Path], Any], said: str, folder: Path) -> None:
    change(folder)
    with pytest.raises(CheckpointError, match=said):
        opened(folder)


def test_options_of_other_checkpoints_are_rejected(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--chunk and --bounds are for OpenVLA-OFT, and .* is OpenVLA"):
        opened(checkpoint("openvla"), chunk=8)
    with pytest.raises(UsageError, match=r"--max-images is 2, and .* has 1 camera: full_image"):
        opened(checkpoint("openvla"), max_images=2)
    with pytest.raises(UsageError, match="--unnorm-key is for policies whose folders lack it"):
        opened(checkpoint("pi0"), unnorm_key="libero")
    random = ("sinkprune-export", "openvla-7b", "--random-weights", "-o", tmp_path / "x", "--unnorm-key", "a")
    assert_refused(run(*random), "random weights have no statistics")


def test_the_export_says_what_it_assumes(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    command = ("sinkprune-export", checkpoint("openvla-oft-bridge"), "--budgets", "prune-80", "-o", tmp_path / "x")
    assumed = run(*command)
    assert (assumed.code, "assumed: chunks of 5 actions" in assumed.stderr) == (0, True)
    told = run(*command, "--force", "--chunk", 5, "--bounds", "q01-q99")
    assert (told.code, "assumed" in told.stderr) == (0, False)


def test_published_files_read_as_the_presets(folder: Path) -> None:
    """openvla-7b's config.json, whose decoder has no sizes: they are transformers' defaults."""
    published = {name: value for name, value in PRESETS["openvla-7b"].items() if name != "action_dim"}
    for extra in ({}, {"timm_model_args": [{}, {}]}):
        config = {**published, **extra, "hf_llm_id": "meta-llama/Llama-2-7b-hf", "output_projector_states": False}
        config = read_openvla(ExportRequest("oft"), folder, config).files["config.json"]
        family = read_family("oft", config)
        assert family.language_model == read_family("preset", PRESETS["openvla-7b-oft"]).language_model
        assert (family.language_model.num_layers, family.language_model.vocab_size) == (32, 32064)
        assert (family.visual_width, family.tokens_of({})) == (1024 + 1152, 256)
        assert family.vision.num_blocks == 26 and not family.causal


STATE_DICT = {
    "module.a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "c": torch.tensor(3.0, dtype=torch.float16),
    "d": torch.arange(10, dtype=torch.float64)[4:],
}


def test_a_state_dict_reads_as_pytorch_reads_it(tmp_path: Path) -> None:
    torch.save(STATE_DICT, tmp_path / "x.pt")
    file = TorchFile(tmp_path / "x.pt")
    assert file.keys() == ["a", "b", "c", "d"]
    kinds = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
    assert kinds == ["F32", "BF16", "F16", "F64"]
    for name, value in zip(file.keys(), STATE_DICT.values(), strict=True):
        assert file.get_slice(name).get_shape() == [*value.shape]
        np.testing.assert_array_equal(file.get_tensor(name).astype(np.float64), value.double())
    file.close()


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran",)


def archive(path: Path, index: bytes, **entries: bytes) -> None:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x/data.pkl", index)
        for name, content in entries.items():
            made.writestr(f"x/data/{name}", content)


def truncated(path: Path) -> None:
    torch.save({"t": torch.ones(2000)}, path)
    with zipfile.ZipFile(path) as whole:
        index = whole.read(next(name for name in whole.namelist() if name.endswith("data.pkl")))
    archive(path, index, **{"0": b"\0" * 4})


@pytest.mark.parametrize(
    "damaged",
    [
        lambda path: path.write_bytes(b"no archive"),
        lambda path: archive(path, pickle.dumps(Evil(), 2)),
        lambda path: archive(path, pickle.dumps([1, 2], 2)),
        lambda path: torch.save({"t": torch.ones(3, 4).T}, path),
        lambda path: torch.save({"t": torch.ones(3, dtype=torch.int64)}, path),
        truncated,
    ],
)
def test_other_pickles_are_rejected_and_not_run(
    damaged: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged(tmp_path / "x.pt")
    with pytest.raises(SinkpruneError, match=r"x\.pt' is no state dict of floats as torch\.save writes it"):
        TorchFile(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def test_tensors_of_the_head_have_the_shapes_of_the_decoder(folder: Path) -> None:
    shape = OPENVLA_SHAPES["openvla-oft"]
    with_head(folder, **{"model.fc1.weight": torch.zeros(64, 447)})
    found = open_source(ExportRequest(str(folder)))
    with pytest.raises(CheckpointError, match=r"'model.fc1.weight' has shape \[64, 447\], expected \[64, 448\]"):
        found.weights.tensor("action_head.model.fc1.weight", [64, 64 * shape.action_dim])
    found.weights.close()
