"""Files stay open from their check on: later changes of names do not matter, and altered files are rejected."""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.held_files import HeldFile

SMALL, LARGE = 1000, (1 << 20) + 1000
Alter = Callable[[Path], object]


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def content(request: pytest.FixtureRequest) -> bytes:
    return os.urandom(request.param)


@pytest.fixture
def path(content: bytes, tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(content)
    return tmp_path / "file"


def hold(path: Path) -> HeldFile:
    return HeldFile(path, BundleError)


def replaced(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(bytes(path.stat().st_size))
    beside.replace(path)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def test_all_ways_of_reading_give_the_same_bytes(path: Path, content: bytes) -> None:
    held, progress = hold(path), list[int]()
    assert held.size == len(content)
    assert held.read(len(content)) == content
    assert held.read_at(7, 5) == content[7:12]
    assert held.sha256(progress.append) == hashlib.sha256(content).hexdigest()
    assert sum(progress) == len(content)
    with held.mapped() as mapping:
        assert bytes(mapping) == content
    with held.by_path() as found:
        assert found.read_bytes() == content


@pytest.mark.parametrize("alter", [replaced, Path.unlink, linked, lambda path: path.write_bytes(b"other")])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_path_is_valid_only_while_it_leads_to_the_same_file(alter: Alter, when: str, path: Path) -> None:
    held = hold(path)
    if when == "before":
        alter(path)
    with pytest.raises(BundleError, match="was altered or replaced"), held.by_path():
        assert when == "meanwhile"
        alter(path)


def test_swapping_a_file_and_back_is_noticed(path: Path) -> None:
    held = hold(path)
    with pytest.raises(BundleError, match="was altered or replaced"), held.by_path():
        path.rename(path.with_name("original"))
        path.write_bytes(b"other")
        path.with_name("original").rename(path)


def test_what_is_cut_off_or_altered_in_place_is_refused_and_ends_no_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(LARGE))
    held = hold(tmp_path / "file")
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(100)
    for read in (lambda: held.read_at(5000, 10), lambda: held.read(LARGE), held.sha256):
        with pytest.raises(BundleError, match="was altered or replaced"):
            read()
    (tmp_path / "file").write_bytes(bytes(LARGE - 1) + b"\1")
    with pytest.raises(BundleError, match="was altered or replaced"):
        held.read_at(0, 10)


def test_descriptors_are_closed_and_too_many_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(LARGE))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    held = [hold(tmp_path / "file") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before + 20  # noqa: PTH208
    held.clear()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
    try:
        with pytest.raises(BundleError, match="Too many open files"):
            held += [hold(tmp_path / "file") for _ in range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
