"""The manifest: what is altered, missing or unknown in a bundle is a `BundleError`, never anything else."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.manifest import (
    BUNDLE,
    CHAT_TEMPLATE,
    EMBEDDING,
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    Manifest,
)
from support.models.manifests import changed, manifest_data, refusal, write_data


@pytest.fixture(scope="module")
def original(bundle: Callable[..., Path]) -> Path:
    """A whole bundle; tests leave it alone."""
    return bundle("gqa-112")


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def test_a_manifest_survives_writing_and_reading(original: Path, copied: Path) -> None:
    before = read_bundle(original)
    BUNDLE.write(copied, before.manifest)
    after = read_bundle(copied)
    assert after.manifest == before.manifest
    assert (copied / MANIFEST).read_bytes() == (original / MANIFEST).read_bytes()
    after.verify()


def test_a_bundle_knows_its_files(original: Path) -> None:
    found = read_bundle(str(original))
    assert found.path == original
    assert found.graph_path("vision") == original / "graphs" / "vision.onnx"
    assert found.file(TOKENIZER) == original / "weights" / "tokenizer.json"
    on_disk = {str(path.relative_to(original)) for path in original.rglob("*") if path.is_file()}
    assert set(found.manifest.files) == on_disk - {MANIFEST}


def test_the_sums_of_the_manifest_are_those_of_the_files(original: Path) -> None:
    for name, spec in read_bundle(original).manifest.files.items():
        data = (original / name).read_bytes()
        assert (spec.size, spec.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert file_specs(original)[TOKENIZER] == read_bundle(original).manifest.files[TOKENIZER]


def test_verifying_reports_every_byte_once(original: Path) -> None:
    told: list[int] = []
    found = read_bundle(original)
    found.verify(told.append)
    assert sum(told) == sum(spec.size for spec in found.manifest.files.values())


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert "is not a bundle" in message
    assert "sinkprune-export CHECKPOINT" in message
    (tmp_path / "config.json").touch()
    assert refusal(tmp_path).endswith(f"Make one with: sinkprune-export {tmp_path} -o BUNDLE")


def test_a_missing_folder_is_no_bundle(tmp_path: Path) -> None:
    assert "is not a bundle" in refusal(tmp_path / "missing")


def test_a_file_is_no_bundle(photo_file: Path) -> None:
    assert "is not a bundle" in refusal(photo_file)


def test_a_manifest_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    assert "is a folder, expected a regular file" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1,", "nonsense", '{"format_version": 1', "\ufeff{}", "{} {}", "{'format_version': 1}"],
    ids=repr,
)
def test_a_manifest_that_is_not_json_is_refused(text: str, copied: Path) -> None:
    (copied / MANIFEST).write_text(text, encoding="utf-8")
    assert "is not JSON" in refusal(copied)


def test_a_manifest_that_is_not_text_is_refused(copied: Path) -> None:
    (copied / MANIFEST).write_bytes(b"\xff\xfe\x00\x80")
    assert "is not UTF-8" in refusal(copied)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"format_version": ' + "1" * 5000 + "}"],
    ids=["deep list", "deep object", "long number"],
)
def test_json_beyond_the_parsers_limits_is_refused(text: str, copied: Path) -> None:
    (copied / MANIFEST).write_text(text, encoding="utf-8")
    refusal(copied)


@pytest.mark.parametrize("version", [99, "5", 5.0, True, None, [2], {}], ids=repr)
def test_another_format_version_is_refused_with_both_versions(version: Any, copied: Path) -> None:
    write_data(copied, {**manifest_data(copied), "format_version": version})
    message = refusal(copied)
    assert repr(version) in message
    if version != FORMAT_VERSION:
        assert f"reads {FORMAT_VERSION}" in message
        assert "Upgrade sinkprune" in message


@pytest.mark.parametrize("version", [0, 3, 4, FORMAT_VERSION - 1])
def test_an_older_format_is_refused_with_the_command_that_makes_it_again(version: int, copied: Path) -> None:
    # What its graphs took and gave is not known any more: no field of it is read.
    write_data(copied, {"format_version": version, "old": {}})
    message = refusal(copied)
    assert f"format version {version}" in message and f"reads {FORMAT_VERSION}" in message
    assert f"sinkprune-export CHECKPOINT -o {copied} --force" in message


def test_a_newer_version_is_refused_as_such_even_with_fields_nobody_knows(copied: Path) -> None:
    write_data(copied, {"format_version": FORMAT_VERSION + 1, "new": {}})
    assert f"format version {FORMAT_VERSION + 1}" in refusal(copied)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Manifest)])
def test_a_missing_field_is_refused(field: str, copied: Path) -> None:
    data = manifest_data(copied)
    del data[field]
    message = refusal(write_and_return(copied, data))
    assert f"'{field}'" in message or (field == "format_version" and "format version None" in message)


def write_and_return(root: Path, data: Any) -> Path:
    write_data(root, data)
    return root


@pytest.mark.parametrize(
    "place",
    [("extra",), ("tokens", "extra"), ("language_model", "extra"), ("graphs", "vision", "extra")],
    ids=".".join,
)
def test_an_unknown_field_is_refused_with_its_place(place: tuple[str, ...], copied: Path) -> None:
    data = manifest_data(copied)
    write_data(copied, changed(data, place, lambda container, key: container.update({key: 1})))
    message = refusal(copied)
    assert "unknown field 'extra'" in message
    assert ".".join(("$", *place[:-1])) in message


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("precision",), "fp8"),
        (("dialect",), "onnx99"),
        (("cut_after",), ["1"]),
        (("tokens", "image"), True),
        (("language_model", "hidden_size"), 64.0),
        (("language_model", "rope_theta"), "10000"),
        (("language_model", "rope_theta"), 10**400),
        (("checkpoint", "random_weights"), 0),
        (("budgets", "retain-64", "order"), "spiral"),
        (("plans", "sinkpruner", "retain-64", "counts", "stages"), 3),
        (("graphs", "vision", "inputs", 0, "dtype"), "float8"),
        (("files", EMBEDDING, "size"), None),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else repr(value)[:12],
)
def test_a_value_of_another_type_is_refused_with_its_place(place: tuple[Any, ...], value: Any, copied: Path) -> None:
    data = manifest_data(copied)
    write_data(copied, changed(data, place, lambda container, key: container.__setitem__(key, value)))
    message = refusal(copied)
    assert "malformed at $." in message
    assert str(place[-1]) in message


@pytest.mark.parametrize(
    ("name", "budget", "must"),
    [("gqa-112", "retain-64", "counts and no shares"), ("qwen", "prune-80", "shares and no counts")],
)
def test_a_plan_has_counts_or_shares_as_its_images_do(
    name: str, budget: str, must: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(bundle(name), tmp_path / "bundle"))
    data = manifest_data(root)
    plan = data["plans"]["sinkpruner"][budget]
    counts = {"outliers": 1, "sink": 1, "reserve": 2, "diverse": 2, "stages": [3, 2, 1]}
    for neither in (
        plan | {"counts": None, "shares": None},
        plan | {"counts": counts} | {"shares": data["budgets"][budget]},
    ):
        write_data(
            root, changed(data, ("plans", "sinkpruner", budget), lambda c, key, to=neither: c.update({key: to}))
        )
        assert f"'{budget}' that must have {must}" in refusal(root)


def test_an_unknown_family_is_refused_by_name(copied: Path) -> None:
    write_data(copied, {**manifest_data(copied), "family": "llava-9"})
    assert "llava-9" in refusal(copied)


@pytest.mark.parametrize("name", [EMBEDDING, TOKENIZER, CHAT_TEMPLATE, "graphs/vision.onnx"])
def test_a_missing_file_is_refused_by_name(name: str, copied: Path) -> None:
    (copied / name).unlink()
    message = refusal(copied)
    assert f"'{name}' is missing" in message
    assert "again" in message


def test_a_folder_in_place_of_a_file_is_refused(copied: Path) -> None:
    (copied / TOKENIZER).unlink()
    (copied / TOKENIZER).mkdir()
    assert f"'{TOKENIZER}' is a folder" in refusal(copied)


@pytest.mark.parametrize("change", [b"", b"{}", None], ids=["emptied", "replaced", "one byte longer"])
def test_a_file_of_another_size_is_refused_with_both_sizes(change: bytes | None, copied: Path) -> None:
    path = copied / TOKENIZER
    before = path.read_bytes()
    after = before + b"\n" if change is None else change
    path.write_bytes(after)
    with pytest.raises(BundleError) as caught:
        read_bundle(copied)
    message = str(caught.value)
    assert f"'{TOKENIZER}'" in message
    assert f"has {len(after)} bytes, expected {len(before)}" in message


def test_a_file_of_another_size_is_not_read(copied: Path) -> None:
    with (copied / EMBEDDING).open("r+b") as file:
        file.truncate(1 << 40)
    assert f"has {1 << 40} bytes" in refusal(copied)


@pytest.mark.parametrize("name", [EMBEDDING, "graphs/weights/decoder_1.bin", "graphs/head.onnx"])
@pytest.mark.parametrize("place", [0, -1])
def test_an_altered_byte_is_refused_with_both_sums_and_the_file(name: str, place: int, copied: Path) -> None:
    data = bytearray((copied / name).read_bytes())
    before = hashlib.sha256(data).hexdigest()
    data[place] ^= 1
    (copied / name).write_bytes(data)
    message = refusal(copied)
    assert f"'{name}' was altered" in message
    assert before in message
    assert hashlib.sha256(data).hexdigest() in message
    assert isinstance(read_bundle(copied), Bundle)


@pytest.mark.parametrize(
    "name", ["../secret", "graphs/../../secret", "/etc/passwd", "a/..", "..", "./../secret"], ids=repr
)
@pytest.mark.parametrize("field", ["files", "graphs"])
def test_a_file_outside_the_bundle_is_refused(name: str, field: str, copied: Path) -> None:
    (copied.parent / "secret").write_bytes(b"")
    data = manifest_data(copied)
    if field == "files":
        data["files"][name] = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    else:
        data["graphs"]["vision"]["file"] = name
    write_data(copied, data)
    message = refusal(copied)
    assert f"'{name}'" in message
    assert ("outside the bundle" if field == "files" else "has no size and sha256 for") in message


@pytest.mark.parametrize(
    "name",
    ["n" * 300, "d/" * 3000 + "f", "\x00", "\ud800", "", ".", "graphs"],
    ids=lambda name: ascii(name[:9]),
)
def test_a_file_name_that_cannot_be_a_file_is_refused(name: str, copied: Path) -> None:
    data = manifest_data(copied)
    data["files"][name] = {"size": 0, "sha256": ""}
    write_data(copied, data)
    refusal(copied)
