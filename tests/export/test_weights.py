"""Weights: where they lie in their files, and that each is told of as it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest

PAGE = 4096


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_large_weights_start_on_pages_and_none_overlap(precision: str, bundle: Callable[..., Path]) -> None:
    for path in (bundle("gqa-112", precision) / "graphs").glob("*.onnx"):
        tensors = onnx.load(path, load_external_data=False).graph.initializer
        weights = [tensor for tensor in tensors if uses_external_data(tensor)]
        # Constants, as shapes and scales are, stay in the graph.
        assert all(tensor.ByteSize() < 200 for tensor in tensors if tensor not in weights)
        assert weights, path
        end, file = 0, path.parent / "weights" / f"{path.stem}.bin"
        for tensor in weights:
            where = ExternalDataInfo(tensor)
            assert path.parent / where.location == file
            assert where.offset >= end
            assert where.offset % (PAGE if where.length >= PAGE else 2) == 0
            end = where.offset + where.length
        assert file.stat().st_size == end


def test_every_weight_is_told_of(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    told: Counter[str] = Counter()

    def progress(what: str, weights: int) -> None:
        told[what] += weights

    request = ExportRequest(str(checkpoint("gqa-112")), budgets=("retain-64",))
    manifest = export_bundle(request, tmp_path / "out", progress=progress)
    assert told.pop("checking sums") == 0
    assert told.pop("embedding") == manifest.language_model.vocab_size * manifest.language_model.hidden_size
    written = {}
    for name in told:
        tensors = onnx.load(tmp_path / "out/graphs" / f"{name}.onnx", load_external_data=False).graph.initializer
        written[name] = sum(int(np.prod(tensor.dims)) for tensor in tensors if uses_external_data(tensor))
    assert told == written
    assert set(told) == {name for name in manifest.graphs if "/" not in name}
