"""The caches of TensorRT's decoders, on fakes: which calls are captured and replayed, and what is copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.errors import BackendError
from support.references.steps import ask
from support.stand_ins.fake_tensorrt import Rig, rig_of

NEW_TOKENS = 4
CAPTURED = 3
"""Calls of a decoder in an answer that is captured: with the second token, and twice with the third."""


@pytest.fixture
def in_dialect(bundle: Callable[..., Path], tmp_path: Path) -> Callable[[str], Rig]:
    """A rig with engines of a bundle in a dialect."""
    return lambda dialect: rig_of(bundle("gqa-112", "fp32", ("retain-64",), dialect), tmp_path / dialect)


@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
def test_calls_are_captured_at_their_second_use_and_replayed_from_then_on(
    dialect: str, in_dialect: Callable[[str], Rig], photo: Image.Image
) -> None:
    """Whatever the length of the cache: one graph for a segment and the room of its cache."""
    rig = in_dialect(dialect)
    # A call that is captured is run, then recorded.
    for tokens, calls in ((2, 1), (2, 2), (NEW_TOKENS, 0), (12, 0)):
        ask(rig.pipeline, photo, "retain-64", tokens)
        assert rig.decode_calls() == {calls}
        assert rig.calls(0) == {calls}
        rig.clear()
    # Tokens before the third have the head's input at other addresses than later ones.
    for _ in range(3):
        rig.clear()
        ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    assert rig.enqueued() == 0 and "begin_capture" not in rig.device.calls
    # A pass is the decoders and the head. Before the first are frames, tower, sanitizer, projector and select.
    assert rig.device.calls.count("replay") == NEW_TOKENS * (len(rig.decoders) + 1) + 5


def test_what_differs_in_a_shape_or_an_address_is_not_replayed(
    in_dialect: Callable[[str], Rig], photo: Image.Image
) -> None:
    rig = in_dialect("opset20")
    for _ in range(2):
        ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    rig.clear()
    # Another budget has caches of other rooms.
    ask(rig.pipeline, photo, "none", NEW_TOKENS)
    assert rig.decode_calls() == {CAPTURED}
    rig.clear()
    # Somebody holds a tensor of the size of a token's hidden state: later ones lie elsewhere.
    model, dtype = rig.pipeline.chain.model, rig.pipeline.chain.dtype
    held = rig.backend.tensor(np.zeros((1, 1, model.hidden_size), dtype))
    ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    assert rig.decode_calls() == {CAPTURED}
    del held
    rig.clear()
    ask(rig.pipeline, photo, "retain-64", NEW_TOKENS)
    assert rig.decode_calls() == {0}


@pytest.mark.parametrize(
    ("dialect", "rows", "past", "said"),
    [
        ("opset24", 125, 0, r"'decoder_0'.*'hidden'.*\[1, 125,.*'prefill'.*\[1, 124,.*--max-prompt"),
        ("opset24", 1, 192, "193 rows.*192.*--max-prompt.*--max-new-tokens"),
        ("opset20", 1, 193, r"'decoder_0'.*'past_\w+_0'.*256.*'decode'.*192.*--max-new-tokens"),
    ],
)
def test_shapes_beyond_an_optimisation_profile_are_refused(
    dialect: str, rows: int, past: int, said: str, in_dialect: Callable[[str], Rig]
) -> None:
    rig = in_dialect(dialect)
    with pytest.raises(BackendError, match=said):
        run_decoder(rig, rows, past)
    assert rig.enqueued() == 0


def run_decoder(rig: Rig, rows: int, past: int) -> dict[str, Any]:
    chain = rig.pipeline.chain
    model, tensor = chain.model, rig.backend.tensor
    cache = chain.decoders[0].new_cache()

    def call(rows: int) -> dict[str, Any]:
        table = np.zeros((1, rows, model.head_dim // 2), chain.dtype)
        hidden = tensor(np.zeros((1, rows, model.hidden_size), chain.dtype))
        return chain.decoders[0]({"hidden": hidden, "cos": tensor(table), "sin": tensor(table)}, cache)

    if past:
        call(min(past, 124))
    while cache.length < past:
        call(1)
    rig.clear()
    return call(rows)
