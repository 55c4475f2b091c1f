"""The checks of the builder for every graph, with TensorRT-RTX, which builds without a GPU."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.models.heads_of_64 import CONFIG, export_random

if platform.machine() != "x86_64":
    pytest.skip("tensorrt-rtx has wheels for x86-64 only", allow_module_level=True)

import onnx

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Limits, Range
from sinkprune.contract.errors import BundleError, EnginesError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.manifest import GraphSpec, TensorSpec
from sinkprune.engines.profiles import optimisation_profiles
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import BuildJob, EngineFacts
from sinkprune.engines.targets.tensorrt import TensorRTRTX
from sinkprune.runtime.backends.models import Model
from support.models.manifests import file_of

LIMITS = Limits(prompt_tokens=60, new_tokens=20, images=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_random(tmp_path_factory.mktemp("small"), budgets=("retain-64",), precision="fp16")


@pytest.fixture
def head(small: Bundle, tmp_path: Path) -> Callable[..., BuildJob]:
    """Return a function that makes the job for `head`, with changes of its model and optimisation profiles."""

    def get(
        change: Callable[[onnx.ModelProto], None] = lambda model: None,
        spec: GraphSpec = small.manifest.graphs["head"],
        **of_job: Any,
    ) -> BuildJob:
        model = onnx.load(file_of(small, "head"))
        change(model)
        onnx.save(model, tmp_path / "head.onnx")
        changed = {"head.onnx": HeldFile(tmp_path / "head.onnx", BundleError)}
        head = Model("head", spec, "head.onnx", changed, 0)
        job = BuildJob(head, optimisation_profiles(small.manifest, LIMITS)["head"])
        return replace(job, **of_job)

    return get


def build(job: BuildJob, output: Path) -> EngineFacts:
    return TensorRTRTX((86,)).build(job, output, SILENT)


def refusal(job: BuildJob, output: Path) -> str:
    with pytest.raises(EnginesError) as caught:
        build(job, output)
    assert not output.exists()
    message = str(caught.value)
    assert "graph 'head'" in message
    return message


def test_an_operator_the_parser_does_not_know(head: Callable[..., BuildJob], tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "MatMul")
        node.op_type = "Det"
        node.name = "strange_node"
        del node.input[1:]

    message = refusal(head(change), tmp_path / "engine")
    assert "tensorrt-rtx 1." in message
    assert "does not parse" in message
    assert "node 'strange_node' (Det)" in message


def test_an_input_no_layer_reads(head: Callable[..., BuildJob], small: Bundle, tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(onnx.helper.make_tensor_value_info("unused", onnx.TensorProto.FLOAT16, [4]))

    spec = small.manifest.graphs["head"]
    taking_it = replace(spec, inputs=(*spec.inputs, TensorSpec("unused", "float16", (4,))))
    assert "no layer reads the input 'unused'" in refusal(head(change, spec=taking_it), tmp_path / "engine")


def test_other_outputs_than_the_bundle_s_are_refused(
    head: Callable[..., BuildJob], small: Bundle, tmp_path: Path
) -> None:
    spec = small.manifest.graphs["head"]
    (logits,) = spec.outputs
    for output, said in (
        (
            replace(logits, dtype="float32"),
            "output 'logits' is DataType.HALF (-1, 320), the bundle expects float32",
        ),
        (replace(logits, shape=(1, 321)), "the bundle expects float16 [1, 321]"),
        (replace(logits, name="probabilities"), "found the outputs logits, the bundle expects probabilities"),
    ):
        assert said in refusal(head(spec=replace(spec, outputs=(output,))), tmp_path / "engine")


def test_an_optimisation_profile_tensorrt_refuses(head: Callable[..., BuildJob], tmp_path: Path) -> None:
    upside_down = {"prefill": {"hidden": Range((1, 9, 256), (1, 8, 256), (1, 7, 256))}}
    message = refusal(head(optimisation_profiles=upside_down), tmp_path / "engine")
    assert "refuses the optimisation profile 'prefill'" in message
    assert "MIN<=OPT<=MAX" in message
    assert "cudaError" not in message


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
