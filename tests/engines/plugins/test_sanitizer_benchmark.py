"""The parts of the kernels' benchmark that need no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch

import sanitizer_kernels
from sanitizer_kernels import Shape
from sinkprune.contract.errors import BackendError
from support.references import reference


def test_the_plain_selection_is_the_reference() -> None:
    shape = Shape(groups=2, tokens=120, width=24, reserve=7, diverse=20, batch=8, dtype="float32")
    rng = np.random.default_rng(0)
    tokens, salience = rng.normal(size=(2, 120, 24)).astype(np.float32), rng.random((2, 120))
    norms = np.linalg.norm(tokens, axis=-1)
    outliers = np.argsort(-norms, axis=1)[:, : shape.outliers]
    np.put_along_axis(salience, outliers, -np.inf, axis=1)
    reserved = np.argsort(-salience, axis=1)[:, : shape.reserve]
    arrays = (torch.from_numpy(array) for array in (tokens, norms, reserved))
    sink, chosen = sanitizer_kernels.plain_selection(*arrays, shape)
    for group in range(2):
        kept, index = reference.sanitize(tokens[group], norms[group], salience[group], reserve=7, diverse=20, batch=8)
        assert chosen[group].tolist() == index[8:]
        np.testing.assert_allclose(sink[group], kept[0], atol=1e-6)


def test_traffic_is_a_read_of_all_tokens_for_each_tile_of_kept_rows() -> None:
    shape = Shape(groups=3, tokens=576, width=1024, reserve=64, diverse=64, batch=16, dtype="float16")
    # Twice to measure, two tiles of 32 reserved, a tile of 16 for each round but the last; six outliers.
    assert shape.traffic() == 3 * 2048 * (6 + 576 * (2 + 2 + 3))


def test_the_report_shows_medians_and_ratios() -> None:
    text = sanitizer_kernels.report({"ours": [10.0, 20.0, 30.0], "theirs": [40.0, 40.0, 40.0]}, traffic=2_000_000)
    head, ours, theirs = text.splitlines()
    assert head.split() == ["us", "p5", "p95", "GB/s", "ratio"]
    assert ours.split()[1] == "20.0"
    assert ours.split()[-2:] == ["100.0", "1.00"]
    assert theirs.split()[1:] == ["40.0", "40.0", "40.0", "50.0", "2.00"]


@pytest.mark.parametrize(
    ("dtype", "available", "given", "said"),
    [
        ("bfloat16", ["CUDAExecutionProvider"], [], "no bundle has bfloat16 tokens"),
        ("float16", ["CPUExecutionProvider"], [], "this ONNX Runtime has no CUDAExecutionProvider"),
        # It is in the package, but a library it needs is not there.
        ("float16", ["CUDAExecutionProvider"], ["CPUExecutionProvider"], "did not start; .* took CPUExecution"),
    ],
)
def test_bodies_that_would_not_run_on_cuda_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, dtype: str, available: list[str], given: list[str], said: str
) -> None:
    fallen_back = SimpleNamespace(get_providers=lambda: given)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *arguments, **options: fallen_back)
    shape = Shape(groups=1, tokens=40, width=8, reserve=4, diverse=4, batch=4, dtype=dtype)
    with pytest.raises(BackendError, match=said):
        sanitizer_kernels.bodies_on_cuda(shape, 0)


def test_a_file_that_cannot_be_written_is_reported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer_kernels.main(["--json", str(tmp_path / "missing" / "us.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_wrong_sizes_and_a_missing_gpu_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer_kernels.main(["--tokens", "100", "--reserve", "90"]) == 2
    assert "1 outliers, --reserve and --diverse at most --tokens together" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert sanitizer_kernels.main([]) == 2
        # No driver, or nothing to reach it with.
        assert re.search("NVIDIA|cuda-python", capsys.readouterr().err)
