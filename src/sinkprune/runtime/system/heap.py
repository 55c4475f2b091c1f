"""The C library's heap, which keeps what libraries let go of."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give the system back what has been freed, where the C library can: glibc keeps pieces between others that live.

    After loading int4 weights that is as much as a third of the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
