"""ONNX Runtime's tensors: what they give to the host stays whole when they are gone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.pipeline import Pipeline


def test_what_is_read_from_a_tensor_lies_in_memory_of_its_own() -> None:
    backend = load_backend("ort-cpu")
    given = np.arange(4, dtype=np.float32)
    read = backend.numpy(backend.tensor(given))
    np.testing.assert_array_equal(read, given)
    assert not np.shares_memory(read, given)


def test_a_path_that_is_not_utf8_is_named_and_refused(bundle: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bundle-\xff"))
    shutil.copytree(bundle("gqa-112"), folder)
    with pytest.raises(BackendError, match=r"which is not UTF-8\. onnxruntime opens UTF-8 paths only\. Rename the"):
        Pipeline.load(folder, backend="ort-cpu")
