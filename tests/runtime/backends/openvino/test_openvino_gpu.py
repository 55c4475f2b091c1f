"""Backend openvino-gpu against ort-cpu, on a GPU of Intel or on its stand-in; and what is refused without either."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino
import openvino.properties.device
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError
from sinkprune.contract.memory import available_bytes
from sinkprune.runtime.backends.openvino.backend import Gpu
from support.models.small_models import NEXT_SHAPES, QWEN_SHAPES, SHAPES
from support.programs.commands import run
from support.references.same_answers import assert_alike, assert_equal_at_both_ends, options_of

BACKEND = "openvino-gpu"


class CoreStandIn:
    """What openvino says on a machine without a GPU, or on one with `gpu`, which is of a `kind`."""

    available_devices = ("CPU",)

    def __init__(self, gpu: str | None = None, kind: str = "INTEGRATED") -> None:
        self.gpu, self.kind = gpu, kind

    def get_property(self, device: str, name: str) -> Any:
        assert device == "GPU"
        if self.gpu is None:
            raise RuntimeError("Cannot load library libopenvino_intel_gpu_plugin.so: libOpenCL.so.1")
        told = {"FULL_DEVICE_NAME": self.gpu, "DEVICE_TYPE": getattr(openvino.properties.device.Type, self.kind)}
        return told[name]


@pytest.fixture(autouse=True)
def parted_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in attention is not one kernel: that of fp16 comes to no end there."""
    if "INTEL_GPU_STAND_IN" in os.environ:
        asked_for = Gpu.properties
        parted = {"GPU_ENABLE_SDPA_OPTIMIZATION": False}
        monkeypatch.setattr(Gpu, "properties", lambda *args, **options: asked_for(*args, **options) | parted)


def test_without_such_a_gpu_the_error_names_what_to_install() -> None:
    with pytest.raises(BackendError, match=r"finds none here, only CPU\. Install .* intel-opencl-icd"):
        Gpu(CoreStandIn(), BACKEND, None, "fastest")


def test_selection_is_in_fp32_and_all_else_in_fp16_unless_fp32_is_chosen() -> None:
    asked_for: dict[tuple[str, bool], Any] = {
        (compute, weights): Gpu(CoreStandIn("Arc"), BACKEND, None, compute).properties(None, weights=weights)
        for compute in ("fastest", "fp32")
        for weights in (True, False)
    }
    kinds = {key: found["INFERENCE_PRECISION_HINT"] for key, found in asked_for.items()}
    assert kinds.pop(("fastest", True)) == "f16"
    assert {*kinds.values()} == {"f32"}
    # Rows rounded to int8 are not fp32
    assert asked_for["fp32", True]["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == 0
    assert "DYNAMIC_QUANTIZATION_GROUP_SIZE" not in asked_for["fastest", True]


@pytest.mark.parametrize(("kind", "known"), [("INTEGRATED", True), ("DISCRETE", False)])
def test_a_gpu_within_the_processor_takes_the_machine_s_memory(kind: str, known: bool) -> None:
    gpu = Gpu(CoreStandIn("Arc", kind), BACKEND, None, "fastest")
    assert gpu.free_bytes() == (pytest.approx(available_bytes(), rel=0.2) if known else 0)


@pytest.mark.intel_gpu
@pytest.mark.parametrize("name", [*SHAPES, *QWEN_SHAPES, *NEXT_SHAPES])
def test_in_fp32_it_keeps_and_answers_what_onnxruntime_does(
    name: str, bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    theirs, ours = pipeline(name), Pipeline.load(bundle(name), backend=BACKEND, compute="fp32")
    assert_equal_at_both_ends(ours, theirs, photo)


@pytest.mark.intel_gpu
@pytest.mark.parametrize("form", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_what_fp16_changes_is_little(form: str, bundle: Callable[..., Path], photo: Image.Image) -> None:
    precision, weights = options_of(form)
    root = bundle("gqa-112", precision, ("retain-64",), weights=weights)
    exact, fast = Pipeline.load(root, backend="openvino", compute="fp32"), Pipeline.load(root, backend=BACKEND)
    assert_alike(fast, exact, photo)


@pytest.mark.intel_gpu
def test_engines_pass_the_gate(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    root, engines = bundle("gqa-112", budgets=("retain-64",)), tmp_path / "engines"
    assert run("sinkprune-build", root, "-o", engines, "--target", "openvino").code == 0
    ask = ("sinkprune-check", root, engines, "--image", photo_file, "--backend", BACKEND, "--compute", "fp32")
    checked = run(*ask)
    assert checked.code == 0, checked.stderr
