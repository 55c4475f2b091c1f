"""Runs a command that the kernel ends (SIGSYS) at the first socket it opens to a network, in native code too.

    python without_network.py PROGRAM ARGUMENT...

By a seccomp filter, which any process of a Linux may put on itself and its children. Sockets to the machine's own
services (AF_UNIX) may be opened: the C library looks for its cache of names there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys

# The numbers of socket and io_uring_setup, which can open sockets too (asm/unistd.h).
SYSTEM_CALLS = {"x86_64": (41, 425), "aarch64": (198, 425)}
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
# Operations of a filter (linux/bpf_common.h): load a word, go on where it is equal, end
_LOAD, _EQUAL, _END = 0x20, 0x15, 0x06
# Where a filter finds the call's number and its first argument (struct seccomp_data)
_NUMBER, _FIRST = 0, 16
_SET_SECCOMP, _SET_NO_NEW_PRIVILEGES, _FILTER = 22, 38, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid_network() -> None:
    """From now on this process and its children are killed where they open a socket to a network."""
    sockets, rings = SYSTEM_CALLS[platform.machine()]
    operations = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 4, 0, rings),
        (_EQUAL, 0, 2, sockets),
        (_LOAD, 0, 0, _FIRST),
        (_EQUAL, 0, 1, socket.AF_UNIX),
        (_END, 0, 0, _ALLOW),
        (_END, 0, 0, _KILL),
    ]
    code = b"".join(struct.pack("HBBI", *operation) for operation in operations)
    program, libc = _Program(len(operations), code), ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVILEGES, 1, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program))):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter")


if __name__ == "__main__":
    forbid_network()
    os.execv(sys.argv[1], sys.argv[1:])
