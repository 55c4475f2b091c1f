"""The energy of an NVIDIA GPU, as its driver's library tells it (nvidia-ml-py, which NVIDIA keeps)."""

from __future__ import annotations

import os
import time
from typing import Any

from sinkprune.contract.errors import NoSensorError, PowerError
from sinkprune.runtime.power import Reading
from sinkprune.runtime.power.counter import next_count

_PERIOD = 0.02
_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


class Nvml:
    """The GPU that engines compute on: its counter of energy, or its power where it has none (before Volta, vGPUs).

    With several GPUs, that is the first of CUDA_VISIBLE_DEVICES.
    """

    name = "nvml"

    def __init__(self) -> None:
        """Finds the GPU, and that it tells of its power. Raises `NoSensorError` and `PowerError`."""
        try:
            import pynvml
        except ImportError as error:
            raise NoSensorError(
                "nvidia-ml-py is not installed. Install it with: pip install 'sinkprune[nvml]'."
            ) from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoSensorError(f"NVIDIA's driver cannot be asked: {error}.") from error
        self._gpu = self._find()
        self._has_counter = True
        try:
            self._count = self._ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, allowed=pynvml.NVMLError_NotSupported)
            if self._count is None:
                self._has_counter, self._count = False, self._ask(pynvml.nvmlDeviceGetPowerUsage)
            name = self._ask(pynvml.nvmlDeviceGetName)
        except PowerError:
            pynvml.nvmlShutdown()
            raise
        how = "" if self._has_counter else ", by its power, which newer GPUs tell as the mean of a second"
        self.measures = f"{name}, the board{how}"
        self._began: Any = None
        self._joules = 0.0

    def start(self) -> None:
        self._count, self._joules = self._ask(self._source()), 0.0
        self._began = time.monotonic()

    def read(self) -> Reading:
        if self._has_counter:
            now, count = next_count(lambda: self._ask(self._source()), self._count, _PERIOD, "the GPU's counter")
            self._joules += (count - self._count) / 1e3
        else:
            time.sleep(_PERIOD)
            count, now = self._ask(self._source()), time.monotonic()
            self._joules += (now - self._began) * (count + self._count) / 2e3
            self._began = now
        self._count = count
        return Reading(now, self._joules, self._temperatures(), self._clocks())

    def stop(self) -> None:
        """Nothing was begun; the library is let go of with the process."""

    def _source(self) -> Any:
        nvml = self._nvml
        return nvml.nvmlDeviceGetTotalEnergyConsumption if self._has_counter else nvml.nvmlDeviceGetPowerUsage

    def _temperatures(self) -> dict[str, float]:
        degrees = self._ask(
            lambda gpu: self._nvml.nvmlDeviceGetTemperature(gpu, self._nvml.NVML_TEMPERATURE_GPU),
            allowed=self._nvml.NVMLError_NotSupported,
        )
        return {} if degrees is None else {"gpu": float(degrees)}

    def _clocks(self) -> dict[str, float]:
        megahertz = self._ask(
            lambda gpu: self._nvml.nvmlDeviceGetClockInfo(gpu, self._nvml.NVML_CLOCK_SM),
            allowed=self._nvml.NVMLError_NotSupported,
        )
        return {} if megahertz is None else {"gpu": float(megahertz)}

    def _find(self) -> Any:
        """The GPU's handle; raises `PowerError` where nobody can say which it is."""
        nvml, count = self._nvml, self._nvml.nvmlDeviceGetCount()
        if count == 0:
            raise NoSensorError("NVIDIA's driver knows of no GPU.")
        first = os.environ.get(_VISIBLE, "").split(",")[0].strip()
        try:
            if first.startswith("GPU-"):
                return nvml.nvmlDeviceGetHandleByUUID(first)
            if count == 1:
                return nvml.nvmlDeviceGetHandleByIndex(0)
            if first.isdecimal() and os.environ.get(_ORDER) == "PCI_BUS_ID":
                return nvml.nvmlDeviceGetHandleByIndex(int(first))
        except nvml.NVMLError as error:
            raise PowerError(f"the GPU that {_VISIBLE} names, '{first}', cannot be asked: {error}.") from error
        raise PowerError(
            f"this machine has {count} GPUs, and which of them computes is not said. Set {_VISIBLE} to its UUID, "
            "which nvidia-smi -L lists."
        )

    def _ask(self, question: Any, allowed: Any = ()) -> Any:
        """What the library answers of this GPU, None where it raises `allowed`. Raises `PowerError`."""
        try:
            return question(self._gpu)
        except allowed:
            return None
        except self._nvml.NVMLError_NoPermission as error:
            raise PowerError("the GPU's power may not be read: no permission. Run this command with sudo.") from error
        except self._nvml.NVMLError as error:
            raise PowerError(f"the GPU's power cannot be read: {error}.") from error
