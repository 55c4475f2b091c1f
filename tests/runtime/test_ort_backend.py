"""ONNX Runtime's tensors: what they give to the host stays whole when they are gone."""

from __future__ import annotations

import numpy as np

from sinkprune.runtime.backends import load_backend


def test_what_is_read_from_a_tensor_lies_in_memory_of_its_own() -> None:
    backend = load_backend("ort-cpu")
    given = np.arange(4, dtype=np.float32)
    read = backend.numpy(backend.tensor(given))
    np.testing.assert_array_equal(read, given)
    assert not np.shares_memory(read, given)
