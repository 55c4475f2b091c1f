"""`bundle.json`: anything altered, missing, unknown or contradictory is a `BundleError`, never another error."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune import Pipeline
from sinkprune.contract.budgets import one_stage
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.errors import BudgetError, BundleError
from sinkprune.contract.manifest import BUNDLE, EMBEDDING, MANIFEST
from support.models.manifests import changed, file_of, manifest_data, refusal, write_data

Bundles = Callable[..., Path]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
GONE = object()
"""Instead of a value: the field is removed."""


@pytest.fixture(scope="module")
def original(bundle: Bundles) -> Path:
    """A whole bundle; tests leave it alone."""
    return bundle("gqa-112")


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return Path(shutil.copytree(original, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def shared_copy(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose manifest is overwritten again and again."""
    return Path(shutil.copytree(original, tmp_path_factory.mktemp("fuzz") / "bundle"))


def tamper(root: Path, place: str, value: Any) -> None:
    """Write `value` at `place` into the manifest: names joined by slashes, with ~ where a name has one."""

    def change(container: Any, key: Any) -> None:
        if value is GONE:
            del container[key]
        else:
            container[key] = value

    parts = tuple(part.replace("~", "/") for part in place.split("/"))
    write_data(root, changed(manifest_data(root), parts, change))


def test_a_bundle_is_what_was_written(original: Path, copied: Path) -> None:
    before = read_bundle(str(original))
    BUNDLE.write(copied, before.manifest)
    assert read_bundle(copied).manifest == before.manifest
    assert (copied / MANIFEST).read_bytes() == (original / MANIFEST).read_bytes()
    assert file_of(before, "vision") == original / "graphs" / "vision.onnx"
    on_disk = {str(path.relative_to(original)) for path in original.rglob("*") if path.is_file()}
    assert set(before.manifest.files) == on_disk - {MANIFEST}
    for name, spec in before.manifest.files.items():
        data = (original / name).read_bytes()
        assert (spec.size, spec.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    progress: list[tuple[object, ...]] = []
    before.verify(lambda *given: progress.append(given))
    size = sum(spec.size for spec in before.manifest.files.values()) / 1e9
    assert progress[-1] == ("checking sums", size, size, "GB") and len(progress) >= len(before.manifest.files)


def test_plans_are_found_by_method_and_budget(original: Path) -> None:
    manifest = read_bundle(original).manifest
    assert manifest.cut_after == (1, 4)
    assert manifest.segments == (range(2), range(2, 5), range(5, 8))
    assert manifest.plan("sinkpruner", "none") is None
    plan = manifest.plan("sinkpruner", "retain-64")
    assert plan is not None
    assert plan.counts == one_stage(manifest.budgets["retain-64"], 64, 8).resolve(64)
    assert list(plan.select_after) == ["1"]
    for method, budget, said in (
        ("sinkpruner", "rho-5", r"no budget 'rho-5'.*none, retain-192, .*sinkprune-export --budgets"),
        ("magic", "none", r"no method 'magic'.*holds: sinkpruner\..*sinkprune-export --methods"),
        ("SinkPruner", "retain-64", r"no method 'SinkPruner'.*did you mean 'sinkpruner'\?"),
        ("sinkpruner", "retain_64", r"no budget 'retain_64'.*did you mean 'retain-64'\?"),
    ):
        with pytest.raises(BudgetError, match=said):
            manifest.plan(method, budget)


def test_other_folders_are_rejected_with_the_command_that_makes_a_bundle(tmp_path: Path, photo_file: Path) -> None:
    assert "is not a bundle" in refusal(photo_file)
    assert refusal(tmp_path).endswith("sinkprune-export CHECKPOINT -o NEW")
    assert refusal(tmp_path / "missing").endswith(f"sinkprune-export CHECKPOINT -o {tmp_path / 'missing'}")
    manifest = tmp_path / "b" / MANIFEST
    manifest.parent.mkdir()
    manifest.write_text("{}")
    assert refusal(manifest).endswith(f"expected its folder. Give '{manifest.parent}'.")
    (tmp_path / "config.json").touch()
    assert refusal(tmp_path).endswith(f"Make one with: sinkprune-export {tmp_path} -o BUNDLE")
    (tmp_path / MANIFEST).mkdir()
    assert "is a folder, expected a regular file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("tokens", GONE, "malformed at $: missing field 'tokens'"),
        ("vision/tokens", GONE, "malformed at $.vision: missing field 'tokens'"),
        ("language_model/rope_theta", 10**400, "malformed at $.language_model.rope_theta"),
        ("family", "llava-9", "Upgrade sinkprune, or export"),
        ("files/graphs~head.onnx", GONE, "no size and sha256 for 'graphs/head.onnx'"),
        *((f"graphs/{graph}", GONE, f"'{graph}'") for graph in ("vision", "projector", "decoder_2", "head")),
        ("graphs/sinkpruner~retain-64~select_after_1", GONE, "'sinkpruner/retain-64/select_after_1'"),
        ("plans/sinkpruner/retain-64/select_after", {"99": "sinkpruner/retain-64/select_after_1"}, "cut after 1, 4"),
        ("plans/sinkpruner/retain-64/sanitizer", None, "no sanitizer to choose"),
        # Another plan's graph, and one that is no sanitizer
        ("plans/sinkpruner/retain-64/sanitizer", "sinkpruner/retain-32/sanitizer", "its output is kept_"),
        ("plans/sinkpruner/retain-64/counts", None, "'retain-64' that must have counts and no shares"),
        ("language_model/hidden_size", 128, "graph 'projector'"),
        ("language_model/num_layers", 4096, "key_8"),
        ("language_model/num_heads", 8, "query float32[1, 4, 'S', 16], expected query float32[1, 8, None, 16]"),
        ("language_model/rope_sections", [2, 3, 4], "rope_sections [2, 3, 4], expected numbers that add up to 8"),
        ("projector", None, "holds the graph 'projector', which nothing runs"),
        ("precision", "fp16", "tokens float32['G', 64, 64], expected tokens float16[None, 64, 64]"),
        ("cache", "rows", "key_0 float32[1, 2, 'C', 16], expected key_0 float32[1, 2, 'S', 16]"),
        ("cut_after", [0, 5], "select"),
        ("graphs/head/inputs", [{"name": "states", "dtype": "float32", "shape": [1, "S", 64]}], "expected none"),
        ("graphs/vision/file", "../secret", "has no size and sha256 for '../secret'"),
    ],
)
def test_parts_must_be_what_they_may_and_fit_each_other(place: str, value: Any, said: str, copied: Path) -> None:
    tamper(copied, place, value)
    assert said in refusal(copied)


def test_plans_of_any_resolution_have_shares_and_a_sanitizer(bundle: Bundles, tmp_path: Path) -> None:
    root = Path(shutil.copytree(bundle("qwen"), tmp_path / "bundle"))
    whole, plan = manifest_data(root), "plans/sinkpruner/prune-80"
    counts = {"outliers": 1, "sink": 1, "reserve": 2, "diverse": 2, "stages": [3, 2, 1]}
    for field, value, said in (
        ("shares", None, "'prune-80' that must have shares and no counts"),
        ("counts", counts, "'prune-80' that must have shares and no counts"),
        ("sanitizer", None, "no sanitizer to choose"),
    ):
        write_data(root, whole)
        tamper(root, f"{plan}/{field}", value)
        assert said in refusal(root)


def test_the_image_side_must_fit_the_vision_graph(copied: Path) -> None:
    whole = manifest_data(copied)
    for place, value in (
        ("vision/tokens", 65),
        ("vision/image_size", 224),
        ("processor", {}),
        ("processor/size", {"shortest_edge": 10**6}),
        ("processor/crop_size", {"height": 112, "width": 126}),
        ("processor/image_mean", [1e300, 0, 0]),
        ("processor/image_std", [0, 1, 1]),
    ):
        write_data(copied, whole)
        tamper(copied, place, value)
        with pytest.raises(BundleError, match=r"`processor`|`vision`|\$\.vision"):
            Pipeline.load(copied)


@pytest.mark.parametrize("name", [EMBEDDING, "graphs/head.onnx"])
def test_a_file_that_is_not_the_one_listed_is_refused(name: str, copied: Path) -> None:
    path = copied / name
    data = bytearray(path.read_bytes())
    before = hashlib.sha256(data).hexdigest()
    data[-1] ^= 1
    path.write_bytes(data)
    message = refusal(copied)
    assert f"'{name}' was altered" in message
    assert before in message and hashlib.sha256(data).hexdigest() in message
    # Sums are compared when it is verified, sizes before.
    assert isinstance(read_bundle(copied), Bundle)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match=f"'{name}' has {1 << 40} bytes, expected {len(data)}"):
        read_bundle(copied)
    path.unlink()
    message = refusal(copied)
    assert f"'{name}' is missing" in message and "again" in message
    path.mkdir()
    assert f"'{name}' is a folder" in refusal(copied)


@pytest.mark.parametrize(
    "name",
    ["../secret", "graphs/../../secret", "/etc/passwd", "a/..", "..", "./../secret", "n" * 300, "\x00", "\ud800", ""],
    ids=lambda name: ascii(name[:9]),
)
def test_a_file_outside_the_bundle_or_of_an_impossible_name_is_refused(name: str, copied: Path) -> None:
    (copied.parent / "secret").write_bytes(b"")
    data = manifest_data(copied)
    data["files"][name] = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    write_data(copied, data)
    message = refusal(copied)
    assert "outside the bundle" in message or ".." not in name


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within `value`."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_change_of_the_manifest_loads_or_is_refused(
    original: Path, shared_copy: Path, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        text = bytearray((original / MANIFEST).read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(text) - 1))
            text[start : start + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
        (shared_copy / MANIFEST).write_bytes(text)
    else:
        manifest, value = manifest_data(original), data.draw(VALUES)

        def change(container: Any, key: Any) -> None:
            action = data.draw(st.sampled_from(["replace", "remove", "add"]))
            if action == "remove":
                del container[key]
            elif action == "add" and isinstance(container, dict):
                container[data.draw(st.text(max_size=6))] = value
            else:
                container[key] = value

        write_data(shared_copy, changed(manifest, data.draw(st.sampled_from(list(places(manifest)))), change))
    try:
        assert isinstance(read_bundle(shared_copy), Bundle)
    except BundleError as error:
        assert str(shared_copy) in str(error)
