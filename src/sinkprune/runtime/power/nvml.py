"""The energy of an NVIDIA GPU, from its driver's library (by NVIDIA's nvidia-ml-py)."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from sinkprune.contract.errors import NoSensorError, PowerError
from sinkprune.runtime.power.sensor import PERIOD_SECONDS, PowerIntegral, Reading, Sensor, count_steps

_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_COUNTER, _POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"
_COUNTER_RANGE = 1 << 64


def open_nvml(root: Path) -> Sensor:
    """Return the energy counter of the first GPU of CUDA_VISIBLE_DEVICES.

    A GPU without a counter (before Volta, vGPUs) is measured by its power. Raises `NoSensorError` without the
    library, a driver or a GPU, and `PowerError` for a GPU that cannot be read.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NoSensorError(
            "nvidia-ml-py is not installed. Install it with: pip install 'sinkprune[nvml]'."
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoSensorError(f"NVIDIA's driver does not answer: {error}.") from error
    gpu = _Gpu(pynvml, _find_handle(pynvml))
    board = f"{gpu.query('nvmlDeviceGetName')}, the board"
    if gpu.query(_COUNTER, optional=True) is not None:
        return Sensor("nvml", board, gpu.readings_by_counter)
    gpu.query(_POWER)
    return Sensor("nvml", f"{board}, by its power, which newer GPUs average over a second", gpu.readings_by_power)


class _Gpu:
    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def readings_by_counter(self) -> Generator[Reading]:
        def read() -> list[int]:
            return [self.query(_COUNTER)]

        for seconds, millijoules in count_steps(read, [_COUNTER_RANGE], "the GPU's counter"):
            yield Reading(seconds, millijoules / 1e3)

    def readings_by_power(self) -> Generator[Reading]:
        integral = PowerIntegral()
        while True:
            milliwatts, seconds = self.query(_POWER), time.monotonic()
            yield Reading(seconds, integral.add(seconds, milliwatts / 1e3))
            time.sleep(PERIOD_SECONDS)

    def query(self, function: str, *, optional: bool = False) -> Any:
        """Return what a function of the library returns for this GPU; None if `optional` and not supported.

        Raises `PowerError`.
        """
        try:
            return getattr(self._library, function)(self._handle)
        except self._library.NVMLError_NoPermission as error:
            raise PowerError("the GPU's power may not be read: no permission. Run this command with sudo.") from error
        except self._library.NVMLError as error:
            if optional and isinstance(error, self._library.NVMLError_NotSupported):
                return None
            raise PowerError(f"the GPU's power cannot be read: {error}.") from error


def _find_handle(library: Any) -> Any:
    """Return the handle of the GPU in use. Raises `PowerError` if it cannot be determined."""
    count = library.nvmlDeviceGetCount()
    if count == 0:
        raise NoSensorError("NVIDIA's driver finds no GPU.")
    first = os.environ.get(_VISIBLE, "").split(",")[0].strip()
    try:
        if first.startswith("GPU-"):
            return library.nvmlDeviceGetHandleByUUID(first)
        if count == 1:
            return library.nvmlDeviceGetHandleByIndex(0)
        if first.isdecimal() and os.environ.get(_ORDER) == "PCI_BUS_ID":
            return library.nvmlDeviceGetHandleByIndex(int(first))
    except library.NVMLError as error:
        raise PowerError(f"{_VISIBLE} names the GPU '{first}', which cannot be read: {error}.") from error
    raise PowerError(
        f"this machine has {count} GPUs, and the one in use is not known. Set {_VISIBLE} to its UUID, which "
        "nvidia-smi -L lists."
    )
