"""Staging folders: those of ended processes are removed, those of running processes never."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import check_replaceable, recover
from support.programs.listed_folders import KIND, replace, replaced, whole_version, write_folder


def dead(output: Path, *, new: int | None = None, old: int | None = None) -> Path:
    """Make the staging folder that a killed process left, with these versions in it."""
    place = output.with_name(f".{output.name}.partial")
    place.mkdir()
    for name, version in (("new", new), ("old", old)):
        if version is not None:
            write_folder(place / name, version)
    return place


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    with replaced(output) as root:
        write_folder(root, 2)
        with pytest.raises(BundleError, match="another command is writing"), replaced(output):
            pytest.fail("two write at once")
    assert whole_version(output) == 2
    shutil.rmtree(output)
    with replaced(output) as root:
        with pytest.raises(BundleError, match="another command is writing"):
            recover(output, KIND)
        write_folder(root, 3)
    assert [*tmp_path.iterdir()] == [output]


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
        with pytest.raises(BundleError, match="another command is writing"):
            replace(output, 2)
        assert whole_version(root) == 1
        process.send_signal(signal.SIGKILL)
    replace(output, 3)
    assert list(tmp_path.iterdir()) == [output]


def test_without_locks_only_a_new_folder_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    output = tmp_path / "bundle"
    replace(output, 1)
    replace(output, 2)
    place = dead(output, new=3)
    with pytest.raises(BundleError, match=f"If none is running, remove '{place}'"):
        replace(output, 4)
    assert (whole_version(output), whole_version(place / "new")) == (2, 3)


def half_written(output: Path) -> None:
    new = dead(output, new=5) / "new"
    (new / "bundle.json").write_text('{"format')
    (new / "unlisted").mkdir()


LEFT: dict[str, Callable[[Path], object]] = {
    "before writing": dead,
    "while writing": half_written,
    "before the renames": lambda output: dead(output, new=5),
    "after the renames": lambda output: dead(output, old=5),
    "while removing": lambda output: (dead(output, new=5) / "new" / "bundle.json").unlink(),
}


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_what_the_dead_left_is_removed(leave: Callable[[Path], object], tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    leave(output)
    check_replaceable(output, KIND, force=True)
    recover(output, KIND)
    assert len(list(tmp_path.iterdir())) == 2, "a check removes nothing"
    replace(output, 2)
    assert list(tmp_path.iterdir()) == [output]


def test_nothing_is_removed_through_links(tmp_path: Path) -> None:
    output, mine = write_folder(tmp_path / "bundle", 1), write_folder(tmp_path / "mine", 7)
    place = dead(output, old=5)
    shutil.rmtree(place / "old" / "graphs")
    (place / "old" / "graphs").symlink_to(mine / "graphs")
    replace(output, 2)
    assert not place.exists()
    place.symlink_to(mine)
    with pytest.raises(BundleError, match="cannot be written"):
        replace(output, 2)
    place.unlink()
    dead(output)
    (place / "new").symlink_to(mine)
    with pytest.raises(BundleError, match="cannot be removed"):
        replace(output, 2)
    assert (whole_version(output), whole_version(mine)) == (2, 7)


def test_what_was_moved_away_is_put_back(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    place = dead(output, new=2, old=1)
    recover(output, KIND)
    assert whole_version(output) == 1
    shutil.rmtree(output)
    recover(output, KIND)
    assert not output.exists(), "what was never moved away"
    shutil.rmtree(place)
    dead(output, old=1)
    recover(output, KIND)
    assert not output.exists(), "what was replaced"
    write_folder(place / "new", 2)
    with pytest.raises(BundleError, match="Add --force"):
        check_replaceable(output, KIND, force=False)
    assert whole_version(output) == 1


def test_what_was_moved_away_is_never_lost_to_what_came_after(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    place = dead(output, new=2, old=1)
    write_folder(output, 9)
    with pytest.raises(BundleError, match=r"lies in '.*old' and cannot be put back: File exists"):
        replace(output, 10)
    assert (whole_version(output), whole_version(place / "old")) == (9, 1)
