"""ONNX Runtime: tensors whose memory is their own, and what it refuses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends import load_backend


def test_what_is_read_from_a_tensor_lies_in_memory_of_its_own() -> None:
    backend = load_backend("ort-cpu")
    given = np.arange(4, dtype=np.float32)
    read = backend.numpy(backend.tensor(given))
    np.testing.assert_array_equal(read, given)
    assert not np.shares_memory(read, given)


@pytest.mark.parametrize(
    ("library_error", "remedy"),
    [
        # Of onnxruntime 1.23, the last for Python 3.10, for a graph of opset24
        ("Load model failed: Unsupported model IR version: 12, max supported IR version: 11", "--dialect opset20"),
        # Of onnxruntime 1.24
        ("Could not find an implementation for TensorScatter(24) node with name 'x'", "--dialect opset20"),
        ("Load model failed: Protobuf parsing failed.", None),
    ],
)
def test_a_graph_newer_than_the_library_is_refused_with_the_dialect_that_it_reads(
    library_error: str, remedy: str | None, bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(library_error)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(BackendError) as raised:
        Pipeline.load(bundle("gqa-112"), backend="ort-cpu")
    assert library_error.removesuffix(".") in str(raised.value)
    assert (remedy in str(raised.value)) if remedy else ("--dialect" not in str(raised.value))


def test_a_path_that_is_not_utf8_is_named_and_refused(bundle: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bundle-\xff"))
    shutil.copytree(bundle("gqa-112"), folder)
    with pytest.raises(BackendError, match=r"which is not UTF-8\. onnxruntime opens UTF-8 paths only\. Rename the"):
        Pipeline.load(folder, backend="ort-cpu")
