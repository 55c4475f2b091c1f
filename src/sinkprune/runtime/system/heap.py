"""The C library's heap, which keeps freed memory."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return freed memory to the system, where the C library can: glibc keeps free pieces between pieces in use.

    After loading int4 weights this is up to a third of the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
