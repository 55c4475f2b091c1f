"""Launches on a stream that TensorRT hands in, by the CUDA driver itself.

A plugin is called with a stream handle. cuda-python could launch on it, pycuda cannot (its streams are objects of its
own), and a board may carry either; the driver's library is on all of them. Six of its functions are enough, called
by ctypes. Source: CUDA Driver API, "Module Management" and "Execution Control".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.engines.plugins.binaries import Binary, binary
from sinkprune.engines.plugins.launches import Launch

# Values of CUdevice_attribute (cuda.h).
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


def cuda_driver() -> Any:
    """The CUDA driver's library; raises `BackendError` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(
            f"the plugin kernels need an NVIDIA GPU and its driver, and libcuda does not load ({error})."
        ) from error


class KernelRunner:
    """Loads kernels once and enqueues them, in the CUDA context that is current, as TensorRT leaves it.

    `driver` opens the driver's library when the first kernel is needed. All plugins of a library share one runner.
    Methods raise `BackendError` for a kernel that is not shipped, or when the driver refuses.
    """

    def __init__(self, driver: Callable[[], Any] = cuda_driver) -> None:
        self._open = driver
        self._driver: Any = None
        self._loaded: dict[tuple[str, str], tuple[ctypes.c_void_p, Binary]] = {}

    def prepare(self, launches: Sequence[Launch]) -> None:
        """Load the kernels of `launches` now: loading inside a CUDA graph capture would break it."""
        for launch in launches:
            self._load(launch.kernel, launch.dtype)

    def run(self, launches: Sequence[Launch], stream: int) -> None:
        """Enqueue `launches`, in order, on the stream with this handle."""
        for launch in launches:
            function, code = self._load(launch.kernel, launch.dtype)
            values = [_c_value(argument) for argument in launch.arguments]
            parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            self._do(
                "cuLaunchKernel",
                function,
                *(ctypes.c_uint(extent) for extent in (*launch.grid, code.threads, 1, 1, code.shared_bytes)),
                ctypes.c_void_p(stream),
                parameters,
                None,
            )

    def _load(self, kernel: str, dtype: str) -> tuple[ctypes.c_void_p, Binary]:
        if (kernel, dtype) not in self._loaded:
            if self._driver is None:
                self._driver = self._open()
            code = binary(kernel, dtype, self._compute_capability())
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            # PTX is text and must end in a zero byte; a cubin does not mind one.
            self._do("cuModuleLoadData", ctypes.byref(module), code.image + b"\0")
            self._do("cuModuleGetFunction", ctypes.byref(function), module, code.entry.encode())
            self._loaded[kernel, dtype] = function, code
        return self._loaded[kernel, dtype]

    def _compute_capability(self) -> int:
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._do("cuCtxGetDevice", ctypes.byref(device))
        self._do("cuDeviceGetAttribute", ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
        self._do("cuDeviceGetAttribute", ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
        return 10 * major.value + minor.value

    def _do(self, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise BackendError(f"CUDA refused {function} for a plugin kernel: {reason} (error {status}).")


def _c_value(argument: np.uint64 | np.int32) -> ctypes.c_uint64 | ctypes.c_int32:
    if isinstance(argument, np.uint64):
        return ctypes.c_uint64(int(argument))
    return ctypes.c_int32(int(argument))
