"""What of the kernels' benchmark needs no GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import reference
import sanitizer_kernels
from sanitizer_kernels import Shape


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


def test_without_a_gpu_it_says_so_and_so_for_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer_kernels.main(["--tokens", "100", "--reserve", "90"]) == 2
    assert "1 outliers, --reserve and --diverse at most --tokens together" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert sanitizer_kernels.main([]) == 2
        # No driver, or nothing to reach it with.
        assert re.search("NVIDIA|cuda-python", capsys.readouterr().err)
