"""Quantised matrices: supported settings of quantization_config, and damaged tensors that are rejected."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint.folder import SafetensorsWeights
from sinkprune.export.weights.quantised_weights import Quantisation, QuantisedWeights, read_quantisation
from support.models.quantised_checkpoints import Layout, Made, change_config, quantise, stored
from support.programs.commands import assert_refused, run

GPTQ, AWQ = Layout(), Layout("awq")
NAME = "language_model.layers.0.mlp.up_proj.weight"
STEM = NAME.removesuffix(".weight")


def opened(folder: Path, tensors: dict[str, Array], config: dict[str, Any]) -> QuantisedWeights:
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    quantisation = read_quantisation("given", {"quantization_config": config})
    assert quantisation is not None
    return QuantisedWeights(SafetensorsWeights(folder), quantisation)


def test_codes_need_no_floats_and_groups_in_order_no_g_idx(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    layer = quantise(rng.standard_normal((8, 64), np.float32), GPTQ, rng)
    tensors = stored(NAME, layer, GPTQ)
    del tensors[f"{STEM}.g_idx"]
    np.testing.assert_array_equal(opened(tmp_path, tensors, GPTQ.config).tensor(NAME, [8, 64]), layer.matrix)
    weights = opened(tmp_path, tensors, Layout(desc_act=True).config)
    with pytest.raises(CheckpointError, match=r"holds no tensor .*g_idx"):
        weights.layer(NAME, 64, 8)
    # They overflow, and a warning would be an error.
    large = {**tensors, f"{STEM}.scales": np.full_like(layer.scales, 3e38, np.float32)}
    assert np.isinf(opened(tmp_path, large, GPTQ.config).tensor(NAME, [8, 64])).any()
    weights = opened(tmp_path, {**tensors, NAME: layer.matrix}, GPTQ.config)
    with pytest.raises(CheckpointError, match="as floats and as codes"):
        weights.tensor(NAME, [8, 64])


Damage = Callable[[dict[str, Array]], None]


def changed(what: str, change: Callable[[Array], Array] | None = None) -> Damage:
    """Change a tensor of the first layer, or remove it."""

    def apply(tensors: dict[str, Array]) -> None:
        name = next(name for name in tensors if name.endswith(f"layers.0.mlp.up_proj.{what}"))
        array = tensors.pop(name)
        if change:
            tensors[name] = np.ascontiguousarray(change(array))

    return apply


def at(place: Any, value: Any) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        array[place] = value
        return array

    return change


@pytest.mark.parametrize(
    ("layout", "damage", "message"),
    [
        (GPTQ, changed("scales"), ["holds no tensor 'language_model.layers.0.mlp.up_proj.scales'", "[2, 160]"]),
        (AWQ, changed("qzeros"), ["holds no tensor 'language_model.layers.0.mlp.up_proj.qzeros'"]),
        (GPTQ, changed("qweight", lambda a: a[:-1]), ["has shape [7, 160], expected [8, 160]"]),
        (GPTQ, changed("scales", at((0, 0), np.nan)), ["holds NaN or infinity"]),
        (GPTQ, changed("scales", at(..., np.inf)), ["holds NaN or infinity"]),
        (GPTQ, changed("qzeros", at((0, 0), 0x66666666)), ["has the zero point 7, expected 8 alone", "symmetric"]),
        (
            Layout(sym=False),
            changed("qzeros", at((1, 2), -1)),
            ["stores the zero point 15, less one, expected at mos"],
        ),
        (GPTQ, changed("g_idx", at(0, -1)), ["has inputs of group -1 to 1 (g_idx), expected 0 to 1"]),
        (GPTQ, changed("g_idx", at(0, 1)), ["has groups of 31 to 33 inputs (g_idx), expected 32 in each"]),
    ],
)
def test_a_damaged_tensor_is_rejected(
    layout: Layout, damage: Damage, message: list[str], quantised: Callable[[Layout], Made], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(quantised(layout).folder, tmp_path / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert_export_refused(folder, *message)


def assert_export_refused(folder: Path, *message: str) -> None:
    done = run("sinkprune-export", folder, "-o", folder.parent / "out", "--budgets", "retain-64")
    assert_refused(done, *message)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, ["was quantised, but config.json has no quantization_config"]),
        ({**GPTQ.config, "group_size": 128}, ["has 64 inputs, expected a multiple of 128"]),
        ({**GPTQ.config, "bits": 8}, ["has shape [8, ", "expected [16, "]),
    ],
)
def test_a_configuration_of_another_checkpoint_is_rejected(
    config: dict[str, Any] | None, message: list[str], quantised: Callable[[Layout], Made], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(quantised(GPTQ).folder, tmp_path / "checkpoint"))
    change_config(folder, config)
    assert_export_refused(folder, *message)


GPTQ_CONFIG, AWQ_CONFIG = Layout(group_size=128).config, Layout("awq", group_size=128).config
# As auto_gptq 0.4 wrote them
OLDEST = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def read(quantisation: object) -> Quantisation | None:
    return read_quantisation("given", {"quantization_config": quantisation})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OLDEST, Quantisation("gptq", 4, 128, symmetric=True, reordered=False, zeros_less_one=True)),
        ({**GPTQ_CONFIG, "desc_act": True, "sym": False}, Quantisation("gptq", 4, 128, False, True, True)),
        (
            {**GPTQ_CONFIG, "format": "gptq", "checkpoint_format": "GPTQ_V2"},
            Quantisation("gptq", 4, 128, True, False, False),
        ),
        ({**GPTQ_CONFIG, "bits": 8, "group_size": -1}, Quantisation("gptq", 8, None, True, False, True)),
        (AWQ_CONFIG, Quantisation("awq", 4, 128, False, False, False)),
        (
            {**AWQ_CONFIG, "version": "GEMM", "sym": True, "desc_act": True},
            Quantisation("awq", 4, 128, False, False, False),
        ),
        ({}, None),
    ],
)
def test_what_libraries_write_is_read(config: object, expected: Quantisation | None) -> None:
    assert read(config) == expected
    assert read_quantisation("given", {"text_config": {"quantization_config": config}}) == expected
    assert read_quantisation("given", {"text_config": None}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ_CONFIG, "bits": 3}, "quantization_config.bits is 3, expected 4 or 8"),
        ({**AWQ_CONFIG, "bits": 8}, "quantization_config.bits is 8, expected 4;"),
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors', expected gptq or awq"),
        ({"quant_method": ["awq"]}, r"quantization_config.quant_method: found \['awq'\], expected 1 to 200"),
        ({**AWQ_CONFIG, "version": "gemv"}, "quantization_config.version is 'gemv', expected gemm"),
        ({**GPTQ_CONFIG, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected gptq or gptq_v2"),
        ({**GPTQ_CONFIG, "is_marlin_format": True}, "is_marlin_format is true, expected false"),
        ({**AWQ_CONFIG, "zero_point": False}, "zero_point is false, expected true"),
        ({**GPTQ_CONFIG, "group_size": 16}, "group_size is 16, expected a multiple of 32, or -1"),
    ],
)
def test_an_unsupported_setting_is_rejected_by_name(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config)
    with pytest.raises(CheckpointError, match="quantization is MLX's, which is not read"):
        read_quantisation("given", {"quantization": {"bits": 4, "group_size": 64}})
