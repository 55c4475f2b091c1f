"""The backend that runs where none is named, and the types that backends compute in."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError, UsageError
from sinkprune.runtime.backends import known, load_backend
from sinkprune.runtime.backends.known import quickest_backend
from support.programs.commands import assert_refused, run, succeed
from support.references.steps import QUESTION, ask

PAIR = "ort-cpu+openvino"
BOTH = {"onnxruntime", "openvino"}
Bundles = Callable[..., Path]


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (BOTH, PAIR),
        ({*BOTH, "tensorrt", "tensorrt_rtx"}, PAIR),
        ({"openvino"}, "openvino"),
        ({"onnxruntime"}, "ort-cpu"),
        # Its error says what to install.
        ({"tensorrt"}, "ort-cpu"),
        (set(), "ort-cpu"),
    ],
)
def test_the_quickest_of_what_is_installed(installed: set[str], expected: str) -> None:
    assert quickest_backend(installed.__contains__) == expected


def test_it_runs_and_is_named(bundle: Bundles, photo_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "is_installed", BOTH.__contains__)
    question = (bundle("gqa-112"), "--image", photo_file, "--prompt", QUESTION, "--max-new-tokens", 1)
    assert f" ms in all on {PAIR}; visual tokens" in run("sinkprune-run", *question).stdout
    assert json.loads(run("sinkprune-run", *question, "--json").stdout)["backend"] == PAIR
    report = run("sinkprune-doctor", bundle("gqa-112"), "--json")
    assert json.loads(report.stdout)["backend"] == PAIR
    named = json.loads(run("sinkprune-run", *question, "--backend", "ort-cpu", "--json").stdout)
    assert named["backend"] == "ort-cpu"


def test_a_library_that_does_not_import_is_an_error(bundle: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "is_installed", BOTH.__contains__)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match=r"'ort-cpu\+openvino' needs openvino, .* take --backend ort-cpu\.$"):
        Pipeline.load(bundle("gqa-112"))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rows_are_rounded_unless_compute_is_fp32(weights: str, bundle: Bundles, photo: Image.Image) -> None:
    root = bundle("gqa-112", weights=weights)
    exact, fast = Pipeline.load(root, compute="fp32"), Pipeline.load(root)
    assert (exact.backend.compute, fast.backend.compute) == (
        "the graphs' types",
        "the graphs' types, int8 where weights are",
    )
    _, expected = ask(Pipeline.load(root, backend="openvino", compute="fp32"), photo, "none", 3)
    _, same = ask(exact, photo, "none", 3)
    # Two libraries, one model
    assert np.abs(same - expected).max() < 1e-3 * max(1, np.abs(expected).max())
    _, rounded = ask(fast, photo, "none", 1)
    assert 0 < np.linalg.norm(rounded - expected[:1]) < 0.1 * np.linalg.norm(expected[:1])


def test_engines_that_were_built_to_be_fastest_compute_in_nothing_else(
    bundle: Bundles, photo_file: Path, tmp_path: Path
) -> None:
    root, engines = bundle("gqa-112", weights="int8"), tmp_path / "engines"
    succeed("sinkprune-build", root, "-o", engines, "--target", "onnxruntime")
    nodes = onnx.load(next((engines / "engines").glob("head*")), load_external_data=False).graph.node
    levels = {a.i for node in nodes if node.op_type == "MatMulNBits" for a in node.attribute if "level" in a.name}
    assert levels == {4}
    question = (root, "--image", photo_file, "--prompt", QUESTION, "--engines", engines)
    succeed("sinkprune-run", *question, "--max-new-tokens", 1)
    assert_refused(
        run("sinkprune-run", *question, "--compute", "fp32"), "engines for onnxruntime are built to be fastest"
    )


@pytest.mark.parametrize(
    ("backend", "compute", "said"),
    [
        ("openvino", "int3", "unknown compute 'int3'. Known: fastest, bf16, fp32"),
        ("ort-cpu", "bf16", "backend 'ort-cpu' has fastest and fp32"),
        ("ort-cpu+openvino", "bf16", "backend 'ort-cpu+openvino' has fastest and fp32"),
        ("openvino-gpu", "bf16", "backend 'openvino-gpu' has fastest and fp32"),
        ("ort-cuda", "fp32", "backend 'ort-cuda' computes in the types of the bundle's graphs. Leave"),
    ],
)
def test_what_cannot_be_computed_in_is_refused(backend: str, compute: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        load_backend(backend, compute=compute)  # type: ignore[arg-type]
