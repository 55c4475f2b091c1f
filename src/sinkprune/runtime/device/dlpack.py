"""Reads where the pixels of another library's CUDA tensor are, without a copy.

Sources: DLPack's dlpack.h, Python's specification of DLPack, and Numba's CUDA Array Interface, version 3.
"""

from __future__ import annotations

import ctypes
from typing import Any

from sinkprune.contract.errors import ImageError
from sinkprune.runtime.media.frame import DevicePixels, unreadable


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
