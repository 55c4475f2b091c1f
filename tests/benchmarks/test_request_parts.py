"""`request_parts.py` names every millisecond of a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from request_parts import AROUND, PRODUCTS, measure
from sinkprune import Pipeline


@pytest.mark.parametrize("backend", ["ort-cpu+openvino", "ort-cpu+openvino-prefill"])
def test_the_parts_are_the_whole_request(backend: str, bundle: Callable[..., Path], photo: Image.Image) -> None:
    load = partial(Pipeline.load, bundle("gqa-112", "fp32", ("retain-64",)), backend=backend)

    def ask(pipeline: Pipeline) -> object:
        return pipeline.generate(photo, "What?", budget="retain-64", max_new_tokens=1)

    name, found = measure(load, ask, 2)
    assert name == backend and len(found) == 2
    for parts in found:
        whole = parts.pop("TTFT")
        assert sum(parts.values()) == pytest.approx(whole)
        graphs = {part.partition(":")[0] for part in parts} - {"host"}
        assert graphs == {"vision", "sanitizer", "projector", "decoder", "select", "head"}
        # Each call has its own operators: not those of all calls, nor of none.
        for graph in ("vision", "decoder"):
            own = {part: ms for part, ms in parts.items() if part.startswith(f"{graph}: ")}
            assert 0 < own[f"{graph}: {PRODUCTS}"] < whole
            assert own[f"{graph}: {AROUND}"] > -0.5 * whole
