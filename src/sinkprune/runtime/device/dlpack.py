"""Tensors of other libraries as frames, and where the pixels of a CUDA tensor are, without a copy.

Sources: DLPack's dlpack.h, Python's specification of DLPack, and Numba's CUDA Array Interface, version 3.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.errors import ImageError
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.frame import Frame, shape_of

_ON_HOST = (1, 3)
"""DLPack's numbers of host memory and of pinned host memory."""
_CUDA = 2


class DevicePixels(NamedTuple):
    """Pixels uint8 [1,height,width,3] in device memory, which `owner` keeps."""

    address: int
    shape: tuple[int, ...]
    owner: Any


class _Tensor(ctypes.Structure):
    """The start of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_UINT8 = (1, 8, 1)
"""DLPack's code of unsigned numbers, their bits, and one of them to an element."""


def read_pixels(tensor: Any, stream: int) -> DevicePixels:
    """Return the pixels of a tensor [height,width,3]; work on the CUDA `stream` runs after what computes them.

    Raises `ImageError` for another type, and for pixels that do not lie one after the other.
    """
    if hasattr(tensor, "__dlpack__"):
        try:
            capsule = tensor.__dlpack__(stream=stream)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise unreadable(error) from error
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.POINTER(_Tensor), (ctypes.py_object, ctypes.c_char_p)
        found = get(capsule, b"dltensor").contents
        shape = tuple(found.shape[: found.ndim])
        strides = tuple(found.strides[: found.ndim]) if found.strides else None
        is_bytes, address = (found.code, found.bits, found.lanes) == _UINT8, found.data + found.byte_offset
        # The capsule frees the tensor when it is dropped.
        owner: Any = capsule
    else:
        interface = tensor.__cuda_array_interface__
        shape, strides, owner = tuple(interface["shape"]), interface.get("strides"), tensor
        is_bytes, address = interface["typestr"][1:] == "u1", interface["data"][0]
    if not is_bytes or strides not in (None, (3 * shape[1], 3, 1)):
        raise ImageError(
            f"found a tensor of shape {list(shape)} on the GPU {'with gaps' if is_bytes else 'of another type'}, "
            "expected uint8, pixel after pixel. Give frame.contiguous(), of bytes."
        )
    return DevicePixels(address, (1, *shape), owner)


def unreadable(error: Exception) -> ImageError:
    """Return the error for a tensor whose library does not hand it over."""
    return ImageError(
        f"found a tensor that its library does not share ({error}). Give a plain uint8 tensor, for example by "
        "frame.detach()."
    )


def frame_of(tensor: Any, *, bgr: bool) -> Array | Frame:
    """Return a view of a tensor in host memory as an array, and a `Frame` for one on a GPU.

    Raises `ImageError` for another device, and for a tensor on a GPU that is no uint8 [height,width,3].
    """
    kind, number = tensor.__dlpack_device__() if hasattr(tensor, "__dlpack_device__") else (_CUDA, 0)
    if int(kind) in _ON_HOST:
        try:
            array = np.from_dlpack(tensor)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise unreadable(error) from error
        return array[..., ::-1] if bgr and array.ndim == 3 else array
    if int(kind) != _CUDA or number != 0:
        raise ImageError(
            f"found a frame on device {int(number)} of DLPack's kind {int(kind)}, expected host memory or the first "
            "CUDA GPU. Copy it to the host."
        )
    shape = shape_of(tensor)
    if len(shape) != 3 or shape[2] != 3 or 0 in shape:
        raise ImageError(
            f"found a tensor {list(shape)} as a frame, expected uint8 [height,width,3]. Turn [3,height,width] with "
            "frame.permute(1, 2, 0).contiguous()."
        )
    return Frame(tensor, bgr)
