"""The pictures of a folder, as frames of a camera."""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.errors import ImageError
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.steps.pictures import decoded

_MOST_BYTES = 1 << 30
_CHANNELS = 3


def frame_files(folder: Path) -> list[Path]:
    """The files of a folder in the order of their names, hidden ones left out; raises `ImageError`."""
    if not folder.is_dir():
        raise ImageError(
            f"'{folder}' is no folder. --frames takes a folder of pictures; give single ones by --image."
        )
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    if not files:
        raise ImageError(f"'{folder}' holds no files, expected pictures.")
    return files


def read_frames(files: list[Path], family: Family) -> list[Picture]:
    """The pictures in `files`, all in memory: a camera's frames come decoded. Raises `ImageError`."""
    pictures: list[Picture] = []
    held = 0
    for path in files:
        pictures.append(decoded(path, family))
        held += pictures[-1].size[0] * pictures[-1].size[1] * _CHANNELS
        if held > _MOST_BYTES:
            raise ImageError(
                f"the first {len(pictures)} of {len(files)} pictures take {held / 1e9:.1f} GB in memory, expected up "
                f"to {_MOST_BYTES / 1e9:.1f} GB. Give fewer or smaller ones."
            )
    return pictures
