"""Files of a checkpoint folder: special files, damaged files and links out of the folder are rejected."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from sinkprune.contract.errors import CheckpointError
from sinkprune.export.checkpoint.folder import SafetensorsWeights, file_of, has_entry, read_json
from sinkprune.export.source import ExportRequest, open_source
from support.programs.commands import assert_refused, run

INDEX = "model.safetensors.index.json"
SHARD = "model.safetensors"


@pytest.fixture
def folder(copied: Callable[..., Path]) -> Path:
    """A checkpoint to damage."""
    return copied("qwen")


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def written(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (os.mkfifo, "is a FIFO, expected a regular file"),
    "zeros": (lambda path: path.symlink_to("/dev/zero"), "leads out of the checkpoint folder, to '/dev/zero'"),
    "folder": (Path.mkdir, "is a folder, expected a regular file"),
    "large": (large, "1099511627776"),
}
ODD_JSON: dict[str, tuple[Callable[[Path], None], str]] = {
    **ODD,
    "NaN": (written(b'{"rescale_factor": NaN}'), "NaN is no number in JSON"),
    "deep": (written(b'{"a":' + b"[" * 100_000), "is nested more than 64 deep"),
    "list": (written(b"[]"), "holds [], expected a JSON object"),
}


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", INDEX])
def test_json_files_that_are_none(name: str, folder: Path) -> None:
    for make, message in ODD_JSON.values():
        path = folder / name
        if path.exists():
            path.unlink()
        make(path)
        with pytest.raises(CheckpointError, match=rf"/{name}' .*{re.escape(message)}"):
            open_source(ExportRequest(str(folder), max_frames=8))
        if path.is_dir():
            path.rmdir()


def header(*tensors: tuple[str, dict[str, Any]]) -> bytes:
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(tensor)}" for name, tensor in tensors) + "}"
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


TWICE = [("lm_head.weight", tensor([4], 0, 16)), ("model.lm_head.weight", tensor([4], 16, 32))]
ODD_SHARDS: dict[str, tuple[Callable[[Path], None], str]] = {
    **ODD,
    "large": (large, "is damaged"),
    "header of 2**63 bytes": (written(struct.pack("<Q", 1 << 63) + b"{}"), "has a header of 9223372036854775808 b"),
    "empty": (written(b""), "is damaged"),
    "overlap": (written(header(("a", tensor([4], 0, 16)), ("b", tensor([4], 0, 16))) + bytes(16)), "is damaged"),
    "beyond the end": (written(header(("a", tensor([4], 0, 16))) + bytes(15)), "is damaged"),
    "negative shape": (written(header(("a", tensor([-4], 0, 16))) + bytes(16)), "is damaged"),
    "twice under two names": (
        written(header(*TWICE) + bytes(32)),
        "holds tensor 'model.lm_head.weight', which has been",
    ),
}


@pytest.mark.parametrize("kind", ODD_SHARDS)
def test_shards_that_are_none(kind: str, tmp_path: Path) -> None:
    make, message = ODD_SHARDS[kind]
    make(tmp_path / SHARD)
    with pytest.raises(CheckpointError, match=rf"{SHARD}.*{re.escape(message)}"):
        SafetensorsWeights(tmp_path)


def test_tensors_of_other_shapes_and_types_are_never_read(tmp_path: Path) -> None:
    odd = [("a", tensor([0, 1 << 62], 0, 0)), ("b", tensor([16], 0, 16, "F8_E4M3")), ("c", tensor([1] * 99, 16, 20))]
    written(header(*odd) + bytes(20))(tmp_path / SHARD)
    weights = SafetensorsWeights(tmp_path)
    for name, shape, message in (
        ("a", [4], "has shape"),
        ("b", [16], "is F8_E4M3, expected F32"),
        ("c", [1], "shape"),
    ):
        with pytest.raises(CheckpointError, match=message):
            weights.tensor(name, shape)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "missing field 'weight_map'"),
        ({"weight_map": {}}, "weight_map: found {}, expected an object"),
        ({"weight_map": {"a": 1}}, "weight_map.a: found 1, expected 1 to 200 printable"),
        ({"weight_map": {"a": "/etc/passwd"}}, "names the shard '/etc/passwd'"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "names the shard '../other/model.safetensors'"),
        ({"weight_map": {str(i): f"{i}.safetensors" for i in range(1001)}}, "names 1001 shards, expected at most 1"),
        ({"weight_map": {"a": "gone.safetensors"}}, "shard 'gone.safetensors' is missing"),
    ],
)
def test_an_index_names_shards_within_the_folder(index: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        SafetensorsWeights(tmp_path)


ONE, THREE, MINE = "model-00001-of-00002.safetensors", "model-00001-of-00003.safetensors", "mine.safetensors"
HEAD = "lm_head.weight"


def weights_of(value: float) -> bytes:
    """A shard with one number."""
    return header((HEAD, tensor([1, 1], 0, 4))) + struct.pack("<f", value)


INDEX_OF_ONE = json.dumps({"metadata": {}, "weight_map": {HEAD: ONE}}).encode()
BOTH = {SHARD: weights_of(2), INDEX: INDEX_OF_ONE}
SOURCES: dict[str, tuple[dict[str, bytes], str | None, float | str]] = {
    # save_pretrained of one file leaves the index of earlier shards, and removes them.
    "an index of shards that are gone": (BOTH, None, 2),
    "one file and earlier shards": ({**BOTH, ONE: weights_of(1)}, None, "two sets of weights: model.safetensors, w"),
    "an index and shards of another download": (
        {INDEX: INDEX_OF_ONE, ONE: weights_of(1), THREE: weights_of(3)},
        None,
        1,
    ),
    "a variant next to it": ({SHARD: weights_of(2), "model.fp16.safetensors": weights_of(1)}, None, 2),
    "the file that config.json names": ({SHARD: weights_of(2), MINE: weights_of(3)}, MINE, 3),
    "the index that config.json names": (
        {SHARD: weights_of(2), f"{MINE}.index.json": INDEX_OF_ONE, ONE: weights_of(1)},
        f"{MINE}.index.json",
        1,
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_weights_are_those_that_transformers_reads(source: str, tmp_path: Path) -> None:
    files, named, expected = SOURCES[source]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            SafetensorsWeights(tmp_path, named)
        return
    weights = SafetensorsWeights(tmp_path, named)
    assert weights.tensor(HEAD, [1, 1]).item() == expected
    resolved, _ = _get_resolved_checkpoint_files(
        str(tmp_path), None, None, None, None, False, transformers_explicit_filename=named
    )
    read = {name: value for file in resolved or () for name, value in load_file(file).items()}
    assert read[HEAD].item() == expected


def test_a_hub_cache_is_links_to_blobs(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot, blobs, shared = repository / "snapshots" / "1a2b", repository / "blobs", tmp_path / "hub" / "blobs"
    for made in (snapshot, blobs, shared):
        made.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        # Every other file lies where all models of the cache share theirs.
        path.rename((shared if number % 2 else blobs) / str(number))
        if number % 2:
            (blobs / str(number)).symlink_to(f"../../blobs/{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    source = open_source(ExportRequest(str(snapshot)))
    source.weights.close()
    link = tmp_path / "by-another-name"
    link.symlink_to(snapshot)
    open_source(ExportRequest(str(link))).weights.close()


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "generation_config.json", SHARD])
def test_other_links_out_of_the_folder_are_rejected(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).rename(tmp_path / "secret")
    for target in (str(tmp_path / "secret"), "../secret"):
        (folder / name).symlink_to(target)
        outcome = run("sinkprune-export", folder, "-o", tmp_path / "out")
        assert_refused(outcome, name, "leads out of the checkpoint folder", "Put the file itself in its place")
        (folder / name).unlink()
    # What looks like a hub cache is none when its blobs are a link.
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parents[1] / "blobs").symlink_to(tmp_path)
    (snapshot / name).symlink_to("../../blobs/secret")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint folder"):
        file_of(snapshot, name)


def test_links_within_the_folder_are_followed(folder: Path) -> None:
    (folder / "config.json").rename(folder / "real.json")
    (folder / "config.json").symlink_to("real.json")
    assert read_json(folder, "config.json")["model_type"] == "qwen2_5_vl"
    (folder / "gone.json").symlink_to("nothing.json")
    assert has_entry(folder, "gone.json")
    with pytest.raises(CheckpointError, match=r"gone.json' is missing"):
        read_json(folder, "gone.json")
