"""The number of frames, pages or views in an image file. A model sees the first."""

from __future__ import annotations

from typing import Any, cast

from PIL import Image

_FORMATS = ("GIF", "PNG", "TIFF", "WEBP")
# JPEGs with several pictures (MPO, CIPA DC-007): the tag of their list, and the word in the type of those that are
# views, as stereo cameras write them. Others are previews, depths and brightnesses of the first.
_MP_ENTRIES, _VIEW = 0xB002, "Multi-Frame"
_NOTED = "sinkprune_frames"


def frame_count(image: Image.Image) -> int:
    """Return the number of frames or pages in the file of an image, as `read_image` and `to_rgb` return it."""
    return int(image.info.get(_NOTED, 1))


def note_frames(image: Image.Image, frames: int) -> None:
    """Note how many frames the file of `image` has, for `frame_count`."""
    if frames > 1:
        image.info[_NOTED] = frames


def count_frames(image: Image.Image) -> int:
    """Return the number of frames, pages or views of an opened file; of a damaged file, those before the damage."""
    if image.format not in (*_FORMATS, "MPO"):
        return frame_count(image)
    try:
        if image.format == "MPO":
            _, *further = cast(Any, image).mpinfo[_MP_ENTRIES]
            return 1 + sum(_VIEW in entry["Attribute"]["MPType"] for entry in further)
        return int(getattr(image, "n_frames", 1))
    except Exception:
        # The first frame is whole, and the model sees no other.
        return image.tell() + 1
