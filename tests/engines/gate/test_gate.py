"""The gate passes correct engines at a third of the limits, and finds a fault planted into each of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from sinkprune.contract.bundle import read_bundle
from sinkprune.engines.gate.comparing import check_engines, engines_alone
from sinkprune.engines.gate.report import GraphReport
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.known import backend_of
from support.programs.slow_cases import slow_except
from support.references.honest_engines import Honest
from support.stand_ins.gate_faults import (
    changed_indices,
    like_outputs,
    one_weight,
    overflowing,
    plant,
    scaled_weights,
    swapped,
)
from support.stand_ins.processor_features import fastest_floats

GRAPHS = (
    *("vision", "projector", "decoder_0", "decoder_1", "decoder_2", "decoder_3", "head"),
    *(f"sinkpruner/retain-64/{name}" for name in ("sanitizer", "select_after_1")),
)
WITH_WEIGHTS = GRAPHS[:7]
CHOOSING = GRAPHS[7:]
TARGETS = ("onnxruntime", "openvino")


@pytest.fixture(scope="module")
def honest(
    bundle: Callable[..., Path], photo: Image.Image, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Honest]:
    made: dict[str, Honest] = {}

    def get(form: str) -> Honest:
        if form not in made:
            precision, weights = ("fp16", None) if form == "fp16" else ("fp32", None if form == "fp32" else form)
            source = read_bundle(bundle("gqa-112", precision, ("retain-64",), weights=weights))
            folder = tmp_path_factory.mktemp(f"gate-{form}")
            made[form] = Honest(source, folder, [photo], "What is on the table?")
        return made[form]

    return get


@pytest.mark.parametrize(
    ("form", "target"),
    slow_except(
        {("fp32", "onnxruntime"), ("fp16", "openvino")},
        product(("fp32", "fp16", "int8", "int4"), TARGETS),
    ),
)
def test_honest_engines_pass(form: str, target: str, honest: Callable[[str], Honest]) -> None:
    made = honest(form)
    built = open_engines(made.engines(target), made.bundle)
    backend = load_backend(backend_of(built.engines.manifest.target), 1, built)
    report = check_engines(built, engines_alone(built.engines.path), backend, made.question, made.recording)
    assert report.passed
    assert set(report.graphs) == set(GRAPHS) == set(made.bundle.manifest.graphs)
    assert [text.budget for text in report.texts] == ["none", "retain-64"]
    for graph, own in report.graphs.items():
        compared = {tensor.name for tensor in made.bundle.manifest.graphs[graph].outputs}
        assert set(own.outputs) == {name for name in compared if not name.startswith(("key_", "value_"))}
        for name, output in own.outputs.items():
            assert output.typical is not None and output.worst is not None
            assert 3 * output.typical <= output.typical_limit, (graph, name, output)
            assert 3 * output.worst <= output.worst_limit, (graph, name, output)


def assert_found(report: GraphReport, outputs: set[str]) -> None:
    """Assert that the gate rejects one of these outputs."""
    assert report.refused in outputs, report


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("graph", WITH_WEIGHTS)
def test_one_other_weight_is_found(graph: str, target: str, honest: Callable[[str], Honest], tmp_path: Path) -> None:
    made = honest("fp32")
    planted = plant(made.bundle, made.engines(target), graph, one_weight, tmp_path)
    report = made.compare(planted, graph, "fp32" if target == "openvino" else None)
    assert_found(report, {tensor.name for tensor in made.bundle.manifest.graphs[graph].outputs})


@pytest.mark.parametrize(("form", "target"), [("int8", "onnxruntime"), ("fp32", "openvino"), ("int4", "openvino")])
@pytest.mark.parametrize("graph", WITH_WEIGHTS)
def test_another_matrix_is_found_where_much_is_rounded(
    graph: str, form: str, target: str, honest: Callable[[str], Honest], tmp_path: Path
) -> None:
    made = honest(form)
    planted = plant(made.bundle, made.engines(target), graph, scaled_weights, tmp_path)
    report = made.compare(planted, graph)
    assert report.rounding in (fastest_floats() if form == "fp32" else {"int8"})
    assert_found(report, {tensor.name for tensor in made.bundle.manifest.graphs[graph].outputs})


@pytest.mark.parametrize("graph", GRAPHS)
def test_swapped_outputs_are_found(graph: str, honest: Callable[[str], Honest], tmp_path: Path) -> None:
    made = honest("fp32")
    outputs = like_outputs(made.bundle.manifest.graphs[graph].outputs)
    if outputs is None:
        assert graph in ("projector", "head") or graph.endswith("sanitizer")
        return
    planted = plant(made.bundle, made.engines("onnxruntime"), graph, swapped(*outputs), tmp_path)
    # A decoder's last outputs are new keys and values, which show at the next token.
    found = {"hidden_out"} if graph.startswith("decoder_") else set(outputs)
    assert_found(made.compare(planted, graph), found)


@pytest.mark.parametrize("saturating", [False, True], ids=["infinite", "saturating"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_an_overflow_of_fp16_is_found(
    graph: str, saturating: bool, honest: Callable[[str], Honest], tmp_path: Path
) -> None:
    made = honest("fp32")
    output = made.bundle.manifest.graphs[graph].outputs[0].name
    planted = plant(
        made.bundle, made.engines("onnxruntime"), graph, overflowing(output, saturating=saturating), tmp_path
    )
    report = made.compare(planted, graph)
    assert_found(report, {output})
    assert (report.outputs[output].worst is None) != saturating


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("graph", CHOOSING)
def test_another_choice_is_found(graph: str, target: str, honest: Callable[[str], Honest], tmp_path: Path) -> None:
    made = honest("fp32")
    output = "kept_index" if graph.endswith("sanitizer") else "keep_index"
    for operator, operand in (("Add", [0, 1]), ("Gather", [1, 0])):
        (tmp_path / operator).mkdir()
        fault = changed_indices(output, operator, operand)
        planted = plant(made.bundle, made.engines(target), graph, fault, tmp_path / operator)
        report = made.compare(planted, graph)
        assert report.refused == output
        assert report.outputs[output].kind == "indices"
        assert report.outputs[output].ties == 0
