"""The builders of TensorRT-RTX, which builds without a GPU, and of full TensorRT, as far as it runs without a GPU.

TensorRT-RTX with another version has the place of full TensorRT, and a stand-in that of a GPU.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from support.models.heads_of_64 import CONFIG, export_random

if platform.machine() != "x86_64":
    pytest.skip("tensorrt-rtx has wheels for x86-64 only", allow_module_level=True)

import onnx
import tensorrt_rtx

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Limits, Range
from sinkprune.contract.errors import BundleError, EnginesError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.manifest import TensorSpec
from sinkprune.engines.plugins import plugin_v3 as registry
from sinkprune.engines.profiles import optimisation_profiles
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import BuildJob, EngineFacts
from sinkprune.engines.targets import tensorrt as tensorrt_libraries
from sinkprune.engines.targets.tensorrt import TensorRT, TensorRTRTX
from sinkprune.runtime.backends.models import Model
from support.models.manifests import file_of

LIMITS = Limits(prompt_tokens=60, new_tokens=20, images=1)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    @cache
    def get(dialect: str = "opset24", precision: str = "fp16") -> Bundle:
        folder = tmp_path_factory.mktemp(dialect)
        return export_random(folder, budgets=("retain-64",), dialect=dialect, precision=precision)

    return get


@pytest.fixture(scope="module")
def small(bundles: Callable[..., Bundle]) -> Bundle:
    return bundles()


def strange_operator(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "MatMul")
    node.op_type, node.name = "Det", "strange_node"
    del node.input[1:]


def unused_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("unused", onnx.TensorProto.FLOAT16, [4]))


def build(job: BuildJob, output: Path) -> EngineFacts:
    return TensorRTRTX((86,)).build(job, output, SILENT)


def test_what_tensorrt_or_the_bundle_does_not_allow_is_refused(small: Bundle, tmp_path: Path) -> None:
    spec = small.manifest.graphs["head"]
    profiles = optimisation_profiles(small.manifest, LIMITS)["head"]
    (logits,) = spec.outputs
    taking_it = replace(spec, inputs=(*spec.inputs, TensorSpec("unused", "float16", (4,))))
    outputs = [
        replace(spec, outputs=(replace(logits, **fact),))
        for fact in ({"dtype": "float32"}, {"shape": (1, 321)}, {"name": "probabilities"})
    ]
    upside_down = {"prefill": {"hidden": Range((1, 9, 256), (1, 8, 256), (1, 7, 256))}}
    for number, (change, own, ranges, said) in enumerate(
        (
            (strange_operator, spec, profiles, r"tensorrt-rtx 1\..* does not parse .*node 'strange_node' \(Det\)"),
            (unused_input, taking_it, profiles, "no layer reads the input 'unused'"),
            (None, outputs[0], profiles, r"'logits' is DataType.HALF \(-1, 320\), the bundle expects float32"),
            (None, outputs[1], profiles, r"the bundle expects float16 \[1, 321\]"),
            (None, outputs[2], profiles, "found the outputs logits, the bundle expects probabilities"),
            (None, spec, upside_down, "refuses the optimisation profile 'prefill'.*MIN<=OPT<=MAX"),
        )
    ):
        model = onnx.load(file_of(small, "head"))
        if change:
            change(model)
        file = tmp_path / f"{number}.onnx"
        onnx.save(model, file)
        job = BuildJob(Model("head", own, file.name, {file.name: HeldFile(file, BundleError)}, 0), ranges)
        with pytest.raises(EnginesError, match=rf"(?s)(?=.*graph 'head').*{said}") as caught:
            build(job, tmp_path / "engine")
        assert "cudaError" not in str(caught.value)
        assert not (tmp_path / "engine").exists()


def test_nodes_are_reported_as_tensorrt_compiled_them(small: Bundle, tmp_path: Path) -> None:
    graph = "sinkpruner/retain-64/sanitizer"
    job = BuildJob(Model.of_bundle(small, graph), optimisation_profiles(small.manifest, LIMITS)[graph])
    names = {
        node.name for node in onnx.load_model_from_string(job.model.onnx).graph.node if node.domain == "sinkprune"
    }
    assert len(names) == 2
    assert build(job, tmp_path / "engine").nodes == dict.fromkeys(names, "function")


def test_prefill_and_decode_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    wide = {**CONFIG["text_config"], "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    large = export_random(tmp_path, {**CONFIG, "text_config": wide}, budgets=("retain-64",), precision="fp16")
    weights = large.manifest.files["graphs/weights/decoder_0.bin"].size
    assert weights > 20e6
    job = BuildJob(Model.of_bundle(large, "decoder_0"), optimisation_profiles(large.manifest, LIMITS)["decoder_0"])
    build(job, tmp_path / "engine")
    # Code takes some 5 MB.
    assert (tmp_path / "engine").stat().st_size < 1.4 * weights


Libraries = Callable[..., TensorRT]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Libraries:
    """Return a function that makes `TensorRT` of a version, on a GPU of a compute capability."""

    def get(version: str = "10.16.2", compute_capability: int = 86) -> TensorRT:
        trt = SimpleNamespace(**{**vars(tensorrt_rtx), "__version__": version})
        monkeypatch.setattr(tensorrt_libraries, "import_tensorrt", lambda name: trt)
        # A GPU with 7 GB free; nothing runs on it.
        gpu = SimpleNamespace(
            name="Fake RTX", compute_capability=compute_capability, memory=lambda: (7_000_000_000, 8_000_000_000)
        )
        monkeypatch.setattr(tensorrt_libraries, "open_device", lambda: gpu)
        return TensorRT(tmp_path / "engines.timing-cache")

    return get


def test_a_bundle_must_suit_the_version(library: Libraries, bundles: Callable[..., Bundle]) -> None:
    library("10.15.1").check_bundle(bundles("opset24"))
    said = r"needs TensorRT 10.15 or later; 10.14.1 is installed here.* --dialect opset20 --random-weights"
    with pytest.raises(EnginesError, match=said):
        library("10.14.1").check_bundle(bundles("opset24"))
    with pytest.raises(EnginesError, match=r"is fp32, and tensorrt compiles ONNX's Attention in fp16 only"):
        library().check_bundle(bundles("opset24", "fp32"))
    # opset20 has ONNX's Attention in small operators.
    library("10.3.0").check_bundle(bundles("opset20", "fp32"))


def test_memory_of_a_board_is_one(library: Libraries) -> None:
    system, gpu = library(compute_capability=86).memories()
    assert (system.activations, gpu.activations) == (False, True)
    assert (gpu.name, gpu.free) == ("memory of Fake RTX", 7_000_000_000)
    for board in (87, 110):
        (shared,) = library(compute_capability=board).memories()
        assert shared.activations and shared.copies == system.copies + gpu.copies


def test_the_timing_cache_is_reused_where_it_fits(library: Libraries, tmp_path: Path) -> None:
    trt, file, config = library(), tmp_path / "engines.timing-cache", Mock()
    config.create_timing_cache.side_effect = bytes
    config.get_timing_cache.return_value.serialize.return_value = b"timed"
    trt.keep_timings(config)
    assert file.read_bytes() == b"timed"
    trt.configure(config)
    config.set_timing_cache.assert_called_once_with(b"timed", ignore_mismatch=False)
    # Another GPU's
    config.set_timing_cache.return_value = False
    trt.configure(config)
    config.set_timing_cache.assert_called_with(b"", ignore_mismatch=False)


def test_sanitizers_are_fitted_to_plugins_and_nothing_else_is(
    library: Libraries, bundles: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def register_for_build(trt: Any, sm: int) -> dict[str, str] | None:
        asked.append(sm)
        return {"TopRho": "sum"} if sm >= 80 else None

    monkeypatch.setattr(registry, "register_for_build", register_for_build)
    trt, source = library("10.3.0", 87), bundles("opset20")
    plain = onnx.load(file_of(source, "head"), load_external_data=False)
    assert trt.fit(plain) is plain
    assert (trt.plugins, asked) == ({}, [])
    sanitizer = onnx.load(file_of(source, "sinkpruner/retain-64/sanitizer"), load_external_data=False)
    fitted = trt.fit(sanitizer)
    assert sanitizer.functions
    assert not fitted.functions
    assert (trt.plugins, asked) == ({"TopRho": "sum"}, [87])
    assert library("10.3.0", 75).fit(sanitizer) is sanitizer
