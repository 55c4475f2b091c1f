"""quantization_config: the supported settings, and others rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import WeightsName
from sinkprune.export.weights.quantised_weights import Quantisation, read_quantisation
from support.models.quantised_checkpoints import Layout

GPTQ, AWQ = Layout(group_size=128).config, Layout("awq", group_size=128).config
# As auto_gptq 0.4 wrote them
OLDEST = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def read(quantisation: object) -> Quantisation | None:
    return read_quantisation("given", {"quantization_config": quantisation})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OLDEST, Quantisation("gptq", 4, 128, symmetric=True, reordered=False, zeros_less_one=True)),
        ({**GPTQ, "desc_act": True, "sym": False}, Quantisation("gptq", 4, 128, False, True, True)),
        (
            {**GPTQ, "format": "gptq", "checkpoint_format": "GPTQ_V2"},
            Quantisation("gptq", 4, 128, True, False, False),
        ),
        ({**GPTQ, "bits": 8, "group_size": -1}, Quantisation("gptq", 8, None, True, False, True)),
        (AWQ, Quantisation("awq", 4, 128, False, False, False)),
        ({**AWQ, "version": "GEMM", "sym": True, "desc_act": True}, Quantisation("awq", 4, 128, False, False, False)),
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
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3, expected 4 or 8"),
        ({**AWQ, "bits": 8}, "quantization_config.bits is 8, expected 4;"),
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors', expected gptq or awq"),
        ({"quant_method": ["awq"]}, r"quantization_config.quant_method: found \['awq'\], expected 1 to 200"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version is 'gemv', expected gemm"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected gptq or gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is true, expected false"),
        ({**AWQ, "zero_point": False}, "zero_point is false, expected true"),
        ({**GPTQ, "group_size": 16}, "group_size is 16, expected a multiple of 32, or -1"),
    ],
)
def test_an_unsupported_setting_is_rejected_by_name(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config)
    with pytest.raises(CheckpointError, match="quantization is MLX's, which is not read"):
        read_quantisation("given", {"quantization": {"bits": 4, "group_size": 64}})


@pytest.mark.parametrize(
    ("config", "form", "kept_for"),
    [
        (GPTQ, "int4", [None, "int4"]),
        ({**GPTQ, "sym": False}, "uint4", [None, "uint4"]),
        (AWQ, "uint4", [None, "uint4"]),
        ({**GPTQ, "bits": 8}, "int8", [None]),
        ({**GPTQ, "bits": 8, "group_size": -1}, "int8", [None, "int8"]),
        ({**GPTQ, "bits": 8, "sym": False}, "int8", []),
    ],
)
def test_codes_are_kept_where_a_form_holds_them(
    config: object, form: WeightsName, kept_for: list[WeightsName | None]
) -> None:
    found = read(config)
    assert found is not None and found.form == form
    asked: list[WeightsName | None] = [None, "fp32", "fp16", "bf16", "int8", "int4", "uint4"]
    assert [name for name in asked if found.repacks(name)] == kept_for
