"""Staging folders: those of ended processes are removed, those of running processes never."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import check_replaceable, new_staging, recover, remove_abandoned
from sinkprune.contract.files.listed_files import remove_listed
from sinkprune.contract.files.system_calls import Rename, system_rename
from support.programs.listed_folders import KIND, no_such_rename, replace, replaced, whole_version, write_folder

WAYS = pytest.mark.parametrize("rename", [system_rename, no_such_rename], ids=["exchange", "two renames"])


def dead(output: Path, *, new: int | None = None, old: int | None = None) -> Path:
    """Make the staging folder that a killed process left, with these versions in it."""
    place = output.with_name(f".{output.name}.abc_1234.partial")
    place.mkdir()
    (place / "sinkprune.lock").touch()
    if new is not None:
        write_folder(place / "new", new)
    if old is not None:
        write_folder(place / "old", old)
    return place


@WAYS
def test_two_that_write_at_once_both_end_well(rename: Rename, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    for version in (1, 11):
        with replaced(output, rename=rename) as first:
            write_folder(first, version)
            with replaced(output, rename=rename) as second:
                write_folder(second, version + 1)
                replace(output, version + 2, rename=rename)
                assert whole_version(first) == version
                assert whole_version(second) == version + 1
            assert whole_version(output) == version + 1
        assert whole_version(output) == version
    assert list(tmp_path.iterdir()) == [output]


def test_without_force_the_later_of_two_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(BundleError, match="Add --force"))
        write_folder(stack.enter_context(replaced(output, force=False)), 1)
        with replaced(output, force=False) as root:
            write_folder(root, 2)
    assert whole_version(output) == 2
    assert list(tmp_path.iterdir()) == [output]


def test_a_process_that_lives_and_then_does_not(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    program = (
        "import sys, time; from pathlib import Path\n"
        "from support.programs.listed_folders import replaced, write_folder\n"
        f"with replaced(Path({str(output)!r})) as root: write_folder(root, 1); print(root, flush=1); time.sleep(60)"
    )
    search = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=search) as process:
        assert process.stdout is not None
        root = Path(process.stdout.readline().strip())
        replace(output, 2)
        assert whole_version(root) == 1
        process.send_signal(signal.SIGKILL)
    replace(output, 3)
    assert list(tmp_path.iterdir()) == [output]


def test_a_new_staging_folder_is_never_taken_for_abandoned(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    done = Event()

    def remove() -> None:
        while not done.is_set():
            remove_abandoned(output, KIND)

    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        stack.callback(done.set)
        removers = [pool.submit(remove) for _ in range(2)]
        for _ in range(300):
            with new_staging(output, KIND) as staging:
                assert staging.new.is_dir()
    for remover in removers:
        remover.result()
    assert list(tmp_path.iterdir()) == [output]


def half_written(output: Path) -> None:
    new = dead(output, new=5) / "new"
    (new / "bundle.json").write_text('{"format')
    (new / "unlisted").mkdir()


LEFT: dict[str, Callable[[Path], object]] = {
    "before the lock": lambda output: output.with_name(".bundle._______0.partial").mkdir(),
    "before writing": dead,
    "while writing": half_written,
    "before the exchange": lambda output: dead(output, new=5),
    "after the exchange": lambda output: dead(output, old=5),
    "while removing": lambda output: shutil.rmtree(dead(output, old=5) / "old" / "graphs"),
    "after removing the manifest": lambda output: (dead(output) / "old").mkdir(),
}


@pytest.mark.parametrize("free", [*range(7, 11), 100])
def test_nothing_is_left_where_no_more_files_can_be_opened(free: int, tmp_path: Path) -> None:
    """Neither with few files before the folder is made, nor with none while it is written."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def fill(held: ExitStack) -> None:
        with suppress(OSError):
            while True:
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY))

    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(free)]
        fill(held)
        for descriptor in spare:
            os.close(descriptor)
        with suppress(BundleError), new_staging(tmp_path / "bundle", KIND) as staging:
            (staging.new / "a" / "b" / "c" / "d").mkdir(parents=True)
            fill(held)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_what_the_dead_left_is_removed(leave: Callable[[Path], object], tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    leave(output)
    check_replaceable(output, KIND, force=True)
    recover(output, KIND)
    assert len(list(tmp_path.iterdir())) == 2, "a check removes nothing"
    replace(output, 2)
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    "name",
    [
        ".bundle.abc_1234.partial",
        ".bundle.abcd.partial/sinkprune.lock",
        ".other.abc_1234.partial/sinkprune.lock",
        ".bundle.x.abc_1234.partial/sinkprune.lock",
        ".bundle.ABC_1234.partial/sinkprune.lock",
        "bundle.abc_1234.partial/sinkprune.lock",
        ".bundle.abc_1234.partial/notes.txt",
        ".bundle.abc_1234.partial/new/notes.txt",
        ".bundle.abc_1234.old/notes.txt",
    ],
)
def test_what_only_looks_like_ours_is_left(name: str, tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    replace(output, 2)
    assert (tmp_path / name).read_text() == "mine"


def test_what_was_put_into_the_folder_of_a_dead_process_is_left(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    place = dead(output, new=5)
    (place / "notes.txt").write_text("mine")
    replace(output, 2)
    assert sorted(path.name for path in place.iterdir()) == ["notes.txt", "sinkprune.lock"]


def test_nothing_is_removed_through_links(tmp_path: Path) -> None:
    output, mine = write_folder(tmp_path / "bundle", 1), write_folder(tmp_path / "mine", 7)
    place = dead(output, old=5)
    shutil.rmtree(place / "old" / "graphs")
    (place / "old" / "graphs").symlink_to(mine / "graphs")
    (place / "old" / "license").unlink()
    (place / "old" / "license").symlink_to(mine / "license")
    with pytest.raises(BundleError, match="'graphs', 'license' came into"):
        replace(output, 2)
    assert (place / "old" / "license").is_symlink()
    assert whole_version(mine) == 7
    (place / "new").symlink_to(mine)
    shutil.rmtree(place / "old")
    (place / "old").symlink_to(mine)
    replace(output, 2)
    assert whole_version(mine) == 7


def test_the_manifest_stays_as_long_as_anything_does(tmp_path: Path) -> None:
    output, link = write_folder(tmp_path / "bundle", 1), tmp_path / "link"
    link.symlink_to(output)
    assert remove_listed(link, KIND)
    assert whole_version(output) == 1


def test_what_was_moved_away_is_put_back(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    place = dead(output, new=2, old=1)
    recover(output, KIND)
    assert whole_version(output) == 1
    recover(output, KIND)
    assert whole_version(output) == 1
    shutil.rmtree(output)
    recover(output, KIND)
    assert not output.exists(), "what was never moved away"
    shutil.rmtree(place)
    dead(output, new=2, old=1)
    with pytest.raises(BundleError, match="Add --force"):
        check_replaceable(output, KIND, force=False)
    assert whole_version(output) == 1


def test_what_was_replaced_is_not_put_back(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    dead(output, old=1)
    recover(output, KIND)
    assert not output.exists()


def test_what_is_not_ours_is_not_put_back(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    place = dead(output, new=2, old=1)
    (place / "old" / "bundle.json").write_text("{}")
    recover(output, KIND)
    assert not output.exists()
    with pytest.raises(BundleError, match="came into"):
        replace(output, 3)
    assert (place / "old" / "license").is_file()


def test_what_a_living_process_moved_away_is_left_to_it(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with replaced(output) as root:
        write_folder(root, 2)
        write_folder(root.with_name("old"), 1)
        recover(output, KIND)
        assert not output.exists()
        write_folder(output, 3)
        shutil.rmtree(root.with_name("old"))
    assert whole_version(output) == 2


def test_what_was_moved_away_is_never_lost_to_what_came_after(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    place = dead(output, new=2, old=1)
    write_folder(output, 9)
    recover(output, KIND)
    assert whole_version(output) == 9
    with pytest.raises(BundleError, match=r"lies in '.*old' and cannot be put back: File exists"):
        replace(output, 10)
    assert (whole_version(output), whole_version(place / "old")) == (9, 1)


def test_a_reader_that_finds_nothing_is_quick(tmp_path: Path) -> None:
    start = time.perf_counter()
    for path in (tmp_path / "a" / "b", Path(), Path("..", ".."), Path("/"), Path("a\0b"), tmp_path / ("a" * 300)):
        recover(path, KIND)
    assert time.perf_counter() - start < 1
