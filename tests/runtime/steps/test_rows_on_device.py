"""The rows of a prompt, in the order of tokens that the host does not look at, are those of a host that does."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.families import Rotary
from sinkprune.runtime.steps.chain import EncodedPicture, Later, Scores
from sinkprune.runtime.steps.prompt_rows import lay_out
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.fake_ort_cuda import FakeOrtCuda, cuda_backend

DEVICE = FakeDevice()
OPENED = [cache(lambda: cuda_backend(FakeOrtCuda(DEVICE))), cache(lambda: load_backend("ort-cpu", 1))]
ROTARY = Rotary(10.0, 12, np.dtype(np.float32), (2, 2, 2))
EMBEDDING: Any = type("Embedding", (), {"deepstack_width": 2, "__call__": lambda _, ids: np.float32([ids] * 3).T})()


@st.composite
def pictures(draw: st.DrawFn, places: bool) -> tuple[VisualLayout, np.ndarray, np.ndarray | None]:
    """Return a picture in one part or several, tokens that are kept of it in any order, and `Scores.merged`."""
    groups, tokens, together, texts = draw(
        st.tuples(st.integers(1, 5), st.integers(2, 90), st.booleans(), st.booleans())
    )
    random, rows = np.random.default_rng(draw(st.integers(0, 99))), np.arange(groups * tokens)
    own = random.integers(0, 9, (3, len(rows))) if places else None
    layout = VisualLayout(
        *((9, 9), groups, tokens, rows, np.zeros((len(rows), 4)), (), own, 9, 0, 0),
        texts=("",) * (groups + 1) if texts and groups > 1 else (),
    )
    merged, choices = None, len(rows) if together else tokens
    if places and groups == 1 and draw(st.booleans()):
        left = np.sort(random.permutation(tokens)[: tokens // 2])
        merged, choices = random.choice(left, (1, tokens)), len(left)
        merged[0, left] = left
    count = draw(st.integers(1, choices))
    kept = [random.permutation(choices)[:count] for _ in range(1 if together else groups)]
    return layout, np.stack(kept), merged


@given(st.data(), st.booleans())
def test_rows_stand_where_they_stand_for_a_host_that_reads_tokens(data: st.DataObject, places: bool) -> None:
    shown = data.draw(st.lists(pictures(places), max_size=3))
    parts = sum(layout.parts for layout, *_ in shown)
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=parts + 1, max_size=parts + 1))
    texts = [[100 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    found = []
    for backend in (make() for make in OPENED):
        encoded = []
        for number, (layout, kept, merged) in enumerate(shown):
            norms = Later(backend, backend.tensor(np.zeros((layout.groups, layout.tokens), np.float32)))
            scores = Scores(norms, norms, None if merged is None else Later(backend, backend.tensor(merged)))
            rows = -1 - 1000 * number - np.arange(kept.size, dtype=np.float32).reshape(*kept.shape, 1)
            tensors = [backend.tensor(np.repeat(rows, width, axis=2)) for width in (3, 2)]
            encoded.append(EncodedPicture(tensors[0], Later(backend, backend.tensor(kept)), scores, tensors[1]))
        DEVICE.reads.clear()
        laid_out = lay_out(backend, EMBEDDING, None, texts, [one[0] for one in shown], encoded, pruned=True)
        on_device = {**laid_out.state(backend, ROTARY), **laid_out.deepstack_inputs}
        assert DEVICE.reads == []
        tensors = map(backend.numpy, on_device.values())
        found.append(
            [*tensors, *laid_out.on_host[:2], laid_out.on_host.positions.rows, laid_out.picture, laid_out.text]
        )
    for own, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(own, expected)
