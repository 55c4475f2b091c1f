"""Whatever stands in a manifest's place: a bundle is read, or refused with a `BundleError`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import MANIFEST
from support.models.manifests import changed, manifest_data, refusal, write_data

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def original(bundle: Callable[..., Path]) -> Path:
    """A whole bundle; tests leave it alone."""
    return bundle("gqa-112")


@pytest.fixture(scope="module")
def shared_copy(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose manifest alone is written over, again and again."""
    return Path(shutil.copytree(original, tmp_path_factory.mktemp("fuzz") / "bundle"))


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within `value`."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


@given(data=VALUES)
@settings(max_examples=80, deadline=None)
def test_any_json_value_is_refused(shared_copy: Path, data: Any) -> None:
    write_data(shared_copy, data)
    refusal(shared_copy)


@given(text=st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused(shared_copy: Path, text: bytes) -> None:
    (shared_copy / MANIFEST).write_bytes(text)
    refusal(shared_copy)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_change_of_the_manifest_loads_or_is_refused(
    original: Path, shared_copy: Path, data: st.DataObject
) -> None:
    manifest = manifest_data(original)
    place = data.draw(st.sampled_from(list(places(manifest))))
    value = data.draw(VALUES)

    def change(container: Any, key: Any) -> None:
        action = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove":
            del container[key]
        elif action == "add" and isinstance(container, dict):
            container[data.draw(st.text(max_size=6))] = value
        else:
            container[key] = value

    write_data(shared_copy, changed(manifest, place, change))
    try:
        assert isinstance(read_bundle(shared_copy), Bundle)
    except BundleError as error:
        assert str(shared_copy) in str(error)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_damage_to_the_manifests_text_loads_or_is_refused(
    original: Path, shared_copy: Path, data: st.DataObject
) -> None:
    text = bytearray((original / MANIFEST).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(0, 5))
        text[start : start + length] = data.draw(st.binary(max_size=5))
    (shared_copy / MANIFEST).write_bytes(text)
    try:
        assert isinstance(read_bundle(shared_copy), Bundle)
    except BundleError as error:
        assert str(shared_copy) in str(error)
