"""The embedding table: its rows as safetensors reads them, and nothing of a file that is damaged or another's."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.manifest import EMBEDDING, Manifest
from sinkprune.runtime.steps.prompt_rows import Embedding


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def opened(request: pytest.FixtureRequest, bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(bundle("gqa-112", request.param, ("retain-64",)))


@pytest.fixture(scope="module")
def manifest(bundle: Callable[..., Path]) -> Manifest:
    return read_bundle(bundle("gqa-112")).manifest


def read(path: Path, manifest: Manifest) -> Embedding:
    return Embedding(HeldFile(path, BundleError), manifest)


def test_rows_are_those_of_the_table(opened: Bundle) -> None:
    embedding = Embedding(opened.files[EMBEDDING], opened.manifest)
    table = load_file(opened.path / EMBEDDING)["weight"]
    ids = [0, 5, 5, len(table) - 1]
    assert embedding(ids).dtype == table.dtype
    assert np.array_equal(embedding(ids), table[ids])
    assert embedding([]).shape == (0, table.shape[1])


def test_a_damaged_file_and_another_table_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    size = [manifest.language_model.vocab_size, manifest.language_model.hidden_size]
    entry = {"dtype": "F32", "shape": size, "data_offsets": [0, 4 * prod(size)]}
    for header, said in (
        (b"", "is not JSON"),
        (b"[]", "its header is malformed"),
        ({"weight": 1}, "its header is malformed"),
        ({"weight": {**entry, "shape": [-2, -2]}}, "its header is malformed"),
        ({"weight": {**entry, "dtype": ["F32"]}}, "its header is malformed"),
        ({"weight": {**entry, "shape": size[::-1]}}, "its tensor 'weight' is F32"),
        ({"weights": entry}, "its tensor 'weight' is not there"),
        ({"weight": {**entry, "data_offsets": [0, 16]}}, "is at "),
        ({"weight": entry}, "is at .* of 16 bytes"),
    ):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (tmp_path / "table").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        with pytest.raises(BundleError, match=said):
            read(tmp_path / "table", manifest)
    (tmp_path / "table").write_bytes((1 << 60).to_bytes(8, "little") + b"{}" + bytes(16))
    with pytest.raises(BundleError, match="is not JSON"):
        read(tmp_path / "table", manifest)
    save_file({"weight": np.zeros(size, np.float32)}, tmp_path / "table")
    with pytest.raises(BundleError, match="its tensor 'image_newline' is not there"):
        read(tmp_path / "table", manifest).named("image_newline")


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_damage_is_refused_or_read(opened: Bundle, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    original = (opened.path / EMBEDDING).read_bytes()
    path = tmp_path_factory.getbasetemp() / "damaged-table"
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 120))
        damaged[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path.write_bytes(damaged[: data.draw(st.sampled_from([len(damaged), 5, 60, len(damaged) - 1]))])
    try:
        read(path, opened.manifest)([0, 1])
    except BundleError as error:
        assert str(path) in str(error)
