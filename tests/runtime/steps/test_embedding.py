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


def shape(manifest: Manifest) -> tuple[int, int]:
    return manifest.language_model.vocab_size, manifest.language_model.hidden_size


def read(path: Path, manifest: Manifest) -> Embedding:
    return Embedding(HeldFile(path, BundleError), manifest)


def test_rows_are_those_of_the_table(opened: Bundle) -> None:
    embedding = Embedding(opened.files[EMBEDDING], opened.manifest)
    table = load_file(opened.path / EMBEDDING)["weight"]
    ids = [0, 5, 5, len(table) - 1]
    assert embedding(ids).dtype == table.dtype
    assert np.array_equal(embedding(ids), table[ids])
    assert embedding([]).shape == (0, table.shape[1])


def test_a_table_of_another_shape_or_name_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    vocab, width = shape(manifest)
    for name, size in (("weight", (vocab + 1, width)), ("weight", (width, vocab)), ("weights", (vocab, width))):
        save_file({name: np.zeros(size, np.float32)}, tmp_path / "table")
        with pytest.raises(BundleError, match="its tensor 'weight' is"):
            read(tmp_path / "table", manifest)
    save_file({"weight": np.zeros((vocab, width), np.float32)}, tmp_path / "table")
    with pytest.raises(BundleError, match="its tensor 'image_newline' is not there"):
        read(tmp_path / "table", manifest).named("image_newline")


@pytest.mark.parametrize(
    ("header", "length", "said"),
    [
        (b"", 0, "is not JSON"),
        (b"{}", 1 << 60, "is not JSON"),
        (b"[]", None, "its header is malformed"),
        ({"weight": 1}, None, "its header is malformed"),
        ({"weight": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, None, "its header is malformed"),
        ({"weight": {"dtype": ["F32"], "shape": [2, 2], "data_offsets": [0, 16]}}, None, "its header is malformed"),
        ({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, None, "is F32"),
        ({"weight": {"dtype": "F32", "shape": "its own", "data_offsets": [0, 16]}}, None, "is at "),
        ({"weight": {"dtype": "F32", "shape": "its own", "data_offsets": "its own"}}, None, "is at .* of 16 bytes"),
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(
    header: Any, length: int | None, said: str, manifest: Manifest, tmp_path: Path
) -> None:
    table = {"shape": shape(manifest), "data_offsets": (0, prod(shape(manifest)) * 4)}
    for entry in header.values() if isinstance(header, dict) else ():
        if isinstance(entry, dict):
            entry.update({name: table[name] for name, value in entry.items() if value == "its own"})
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    (tmp_path / "table").write_bytes(size + text + bytes(16))
    with pytest.raises(BundleError, match=said):
        read(tmp_path / "table", manifest)


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
