"""Backend ort-cpu+openvino-prefill: prompts on OpenVINO, tokens on ONNX Runtime, and rows in the caches of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError, EnginesError
from sinkprune.runtime.backends import known
from sinkprune.runtime.backends.kv_cache import BufferedDecoder
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend, _OpenVinoDecoder, _PrefillDecoder
from support.programs.commands import run
from support.references.same_answers import asked, assert_alike, assert_equal_at_both_ends, options_of

BACKEND = "ort-cpu+openvino-prefill"


@pytest.mark.parametrize("name", ["gqa-112", "next", "qwen3-vl", "internvl", "paligemma"])
def test_in_fp32_it_keeps_and_answers_what_onnxruntime_does(
    name: str, bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    ours = Pipeline.load(bundle(name), backend=BACKEND, compute="fp32")
    assert_equal_at_both_ends(ours, pipeline(name), photo)


@pytest.mark.parametrize("form", ["fp16", "int4"])
def test_rounded_forms_answer_nearly_the_same(form: str, bundle: Callable[..., Path], photo: Image.Image) -> None:
    precision, weights = options_of(form)
    root = bundle("gqa-112", precision, ("retain-64",), weights=weights)
    ours, theirs = (Pipeline.load(root, backend=name) for name in (BACKEND, "ort-cpu"))
    assert_alike(ours, theirs, photo)


def test_both_libraries_hold_the_rows_of_a_prompt_until_the_first_token(
    bundle: Callable[..., Path], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[str, list[int]] = {"openvino": [], "onnxruntime": []}
    held: list[int] = []
    in_openvino, in_onnxruntime, in_either = (
        _OpenVinoDecoder.__call__,
        BufferedDecoder.__call__,
        _PrefillDecoder.__call__,
    )

    def run_prompt(decoder, inputs, cache):  # type: ignore[no-untyped-def]
        rows["openvino"].append(inputs["hidden"].shape[1])
        return in_openvino(decoder, inputs, cache)

    def run_token(decoder, inputs, cache):  # type: ignore[no-untyped-def]
        rows["onnxruntime"].append(inputs["hidden"].shape()[1])
        return in_onnxruntime(decoder, inputs, cache)

    def check(decoder, cache, count):  # type: ignore[no-untyped-def]
        assert cache.length == cache.of_prompt.length == count
        states = decoder._prompts.keys_and_values(cache.of_prompt)
        assert {*states} == {*cache.of_tokens.buffers}
        for name, tensor in cache.of_tokens.buffers.items():
            buffer = tensor.numpy()
            assert states[name].shape[2] == count and buffer.any()
            np.testing.assert_array_equal(buffer[:, :, :count], states[name])
            assert not buffer[:, :, count:].any()

    def run_either(decoder, inputs, cache):  # type: ignore[no-untyped-def]
        if inputs["hidden"].shape()[1] == 1 and cache.of_prompt is not None:
            held.append(cache.length)
            check(decoder, cache, cache.length)
            fewer = cache.length - 3
            check(decoder, decoder.restore(decoder.save(cache, fewer), fewer, cache.length), fewer)
        outputs = in_either(decoder, inputs, cache)
        assert inputs["hidden"].shape()[1] > 1 or cache.of_prompt is None
        return outputs

    monkeypatch.setattr(_OpenVinoDecoder, "__call__", run_prompt)
    monkeypatch.setattr(BufferedDecoder, "__call__", run_token)
    monkeypatch.setattr(_PrefillDecoder, "__call__", run_either)
    ours = Pipeline.load(bundle("gqa-112"), backend=BACKEND)
    answer, logits = asked(ours, photo, budget="retain-64")
    segments = len(ours.chain.segments)
    assert len(rows["openvino"]) == len(held) == segments
    assert rows["openvino"] == held and min(held) > 1
    assert rows["onnxruntime"] == [1] * segments * (len(logits) - 1)
    # Answers that alternate have their own caches.
    streams = [ours.stream(photo, "What is on the table?", budget="retain-64", max_new_tokens=4) for _ in range(2)]
    pieces = [[*each] for each in zip(*streams, strict=True)]
    assert all(one == other for one, other in pieces)
    assert [stream.answer.token_ids[:4] for stream in streams] == [answer.token_ids[:4]] * 2


def test_pictures_and_prompts_are_openvino_s_and_tokens_and_the_head_are_not(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    compiled = OpenVinoBackend._compiled
    monkeypatch.setattr(
        OpenVinoBackend, "_compiled", lambda self, model: (loaded.append(model.graph), compiled(self, model))[1]
    )
    pipeline = Pipeline.load(bundle("gqa-112"), backend=BACKEND)
    decoders = [f"decoder_{segment}" for segment in range(len(pipeline.chain.segments))]
    assert loaded == ["vision", "projector", *decoders]
    assert all(isinstance(decoder, _PrefillDecoder) for decoder in pipeline.chain.decoders)
    assert "; tokens in the graphs' types" in pipeline.backend.compute


def test_what_it_does_not_take_is_refused(bundle: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="Export the bundle again with --dialect opset24"):
        Pipeline.load(bundle("gqa-112", dialect="opset20"), backend=BACKEND)
    engines, source = tmp_path / "engines", bundle("gqa-112", budgets=("retain-64",))
    assert run("sinkprune-build", source, "-o", engines, "--target", "onnxruntime+openvino").code == 0
    with pytest.raises(EnginesError, match=r"hold one form of each decoder segment.* --backend ort-cpu\+openvino\.$"):
        Pipeline.load(engines, backend=BACKEND)


def test_both_forms_count_as_memory() -> None:
    both, first, second = (known.KNOWN[name].memory for name in (BACKEND, "openvino", "ort-cpu"))
    assert both and first and second
    for form, copies in both.decoder.copies.items():
        one, other = first.decoder.copies[form], second.decoder.copies[form]
        assert copies.held == one.held + other.held
        assert copies.loading == max(one.loading, other.loading)
