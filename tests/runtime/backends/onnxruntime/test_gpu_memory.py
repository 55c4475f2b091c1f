"""Rows of caches are copied on their device: here by the CPU provider, with the graph that a GPU runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.runtime.backends.onnxruntime import backend as ort
from sinkprune.runtime.backends.onnxruntime.cuda import GpuMemory
from support.references.same_answers import assert_equal


def memory(_: object = None) -> GpuMemory:
    return GpuMemory(onnxruntime, "CPUExecutionProvider", "cpu")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_new_buffers_are_zero_and_apart(dtype: type, rows: int) -> None:
    own = memory()
    first, second = own.buffers(2, (1, 3, rows, 4), np.dtype(dtype))
    if rows:
        own.copy_rows([(own.tensor(np.ones((1, 3, 1, 4), dtype)), first)], 0, 1)
        assert first.numpy()[:, :, :1].all()
    np.testing.assert_array_equal(first.numpy()[:, :, 1:], np.zeros((1, 3, max(rows - 1, 0), 4), dtype))
    np.testing.assert_array_equal(second.numpy(), np.zeros((1, 3, rows, 4), dtype), strict=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("place", "rows"), [(5, 1), (6, 3), (0, 9)])
@pytest.mark.parametrize("more", [0, 2])
def test_rows_are_written_in_place_and_nothing_else_is(dtype: type, place: int, rows: int, more: int) -> None:
    draw = np.random.default_rng(0)
    cache, new = (draw.standard_normal((1, 3, count, 4)).astype(dtype) for count in (9, rows + more))
    expected = cache.copy()
    expected[:, :, place : place + rows] = new[:, :, :rows]
    own = memory()
    target, source = own.tensor(cache.copy()), own.tensor(new)
    where = target.data_ptr()
    own.copy_rows([(source, target)], place, rows)
    assert target.data_ptr() == where
    np.testing.assert_array_equal(target.numpy(), expected)
    np.testing.assert_array_equal(source.numpy(), new)


def test_answers_with_such_buffers_are_those_of_the_cpu(
    bundle: Callable[..., Path], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle("gqa-112", budgets=("retain-64",), dialect="opset20")
    theirs = Pipeline.load(path)
    monkeypatch.setattr(ort, "CpuMemory", memory)
    ours = Pipeline.load(path)
    assert isinstance(ours.backend._caches, GpuMemory)
    for budget in ("none", "retain-64"):
        assert_equal(ours, theirs, photo, budget=budget)


def test_no_cache_goes_through_the_host(
    bundle: Callable[..., Path], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(*_: object) -> None:
        raise AssertionError("a whole tensor was moved")

    monkeypatch.setattr(ort, "CpuMemory", memory)
    monkeypatch.setattr(onnxruntime.OrtValue, "update_inplace", moved)
    pipeline = Pipeline.load(bundle("gqa-112", budgets=("retain-64",), dialect="opset20"))
    assert len(pipeline.generate(photo, "What is this?", budget="retain-64", max_new_tokens=3).token_ids) <= 3
