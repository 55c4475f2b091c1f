"""The order of an array's channels, and tensors of other libraries as pictures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sinkprune.contract.checks import format_value, warn_user
from sinkprune.contract.errors import UsageError
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.frame import is_tensor

if TYPE_CHECKING:
    from sinkprune.runtime.steps.pictures import PictureLike


def check_order(order: object) -> str:
    """Return the order of an array's channels; raises `UsageError` for anything but "rgb" and "bgr"."""
    if not isinstance(order, str) or order not in ("rgb", "bgr"):
        raise UsageError(
            f"order is {format_value(order)}, expected 'rgb' or 'bgr', the order of an array's channels."
        )
    return order


def ordered(given: Iterable[PictureLike], order: object) -> tuple[PictureLike, ...]:
    """Return the `given` pictures in RGB order; channels of arrays and tensors are in `order`, "rgb" or "bgr".

    Tensors of other libraries become arrays in host memory, and a `Frame` on a GPU. Raises `ImageError` for those
    that are elsewhere, or are no frames.

    Raises `UsageError` for another order. Warns (`UserWarning`) where it says nothing, as no picture is an array.
    """
    order, pictures = check_order(order), tuple(given)
    if order == "bgr":
        from sinkprune.runtime.media.clip import Clip

        frames = [frame for source in pictures for frame in (source.frames if isinstance(source, Clip) else [source])]
        if not any(isinstance(frame, np.ndarray) or is_tensor(frame) for frame in frames):
            warn_user(
                "order changed nothing, because no picture is an array. Files and Pillow images have an order of "
                "their own: leave it out."
            )
    return tuple(_with_order(source, order) for source in pictures)


def in_rgb(array: Array, order: str) -> Array:
    """Return a view of the array [height,width,3], whose channels are in `order`, with channels in RGB order."""
    return array[..., ::-1] if order == "bgr" else array


def _with_order(source: PictureLike, order: str) -> PictureLike:
    """Return `source` in RGB order, where it is an array, or a clip of arrays, with channels in `order`."""
    if isinstance(source, np.ndarray) and source.ndim == 3:
        return in_rgb(source, order)
    if is_tensor(source):
        from sinkprune.runtime.device.dlpack import frame_of

        return frame_of(source, bgr=order == "bgr")
    if order == "rgb":
        return source
    from sinkprune.runtime.media.clip import Clip

    if isinstance(source, Clip):
        return Clip([_with_order(frame, order) for frame in source.frames], source.fps)  # type: ignore[misc]
    return source
