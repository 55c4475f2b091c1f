"""The devices that OpenVINO computes on, and what each is asked to compute in. Selection is in fp32 on all."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.contract.system.system_memory import available_bytes
from sinkprune.runtime.backends.known import Compute
from sinkprune.runtime.backends.openvino.library import import_openvino
from sinkprune.runtime.backends.openvino.rounding import group_in_int8
from sinkprune.runtime.system.cores import usable_cores

_NAME = "FULL_DEVICE_NAME"
_INT8 = "int8 where openvino finds it faster"
_KERNELS = 100
"""Of how many sizes OpenVINO keeps what computes them, for each kind of operator of a graph.

By itself it keeps 5000, and a process grows by megabytes with each number of rows that it has not seen before.
"""


class Device(Protocol):
    """Where models are compiled for, and with which of openvino's properties."""

    name: str
    """In openvino's words."""
    threads: int
    """CPU threads it computes with."""
    compute: str
    """What it computes in, in words for reports."""
    cache: str
    """The type of keys and values, in words for reports."""
    versions: dict[str, str]
    """What reports tell of it, by name."""
    fills_blocks: bool
    """Whether rows that fill no block take it longer than such as do."""

    def properties(self, read: Any, *, weights: bool) -> dict[str, Any]:
        """What the model `read` is compiled with; one without `weights` selects tokens."""


class Cpu(Device):
    """The processor: bf16 where it has it, and rows rounded to int8 for int8 and int4 weights.

    Where it has AMX rows stay bf16, as OpenVINO rounds none of them there, and fill whole blocks.
    """

    name = "CPU"

    def __init__(self, core: Any, backend: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` where the processor has no bf16 and `compute` asks for it."""
        has_bf16 = "BF16" in core.get_property(self.name, "OPTIMIZATION_CAPABILITIES")
        if compute == "bf16" and not has_bf16:
            raise BackendError(
                f"backend '{backend}' was to compute in bf16, which this processor lacks: "
                f"{core.get_property(self.name, _NAME)}. Leave --compute out for the fastest it has."
            )
        self.threads = threads or usable_cores()
        self.cache = "bf16" if has_bf16 and compute != "fp32" else "fp32"
        self._int8 = compute == "fastest"
        self.compute = self.cache + (f", {_INT8}" if self._int8 else "")
        self.versions = {}
        self.fills_blocks = self.cache == "bf16" and _has_amx(import_openvino(backend), core)

    def properties(self, read: Any, *, weights: bool) -> dict[str, Any]:
        precision = "bf16" if weights and self.cache == "bf16" else "f32"
        return {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_in_int8(read) if self._int8 else 0,
            "CPU_RUNTIME_CACHE_CAPACITY": _KERNELS,
        }


class Gpu(Device):
    """The first GPU of Intel that there is, in or beside the processor: fp16 unless fp32 is asked for."""

    name = "GPU"
    threads = 1
    """The one that gives it work."""
    fills_blocks = False

    def __init__(self, core: Any, backend: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` where there is none, or no driver."""
        try:
            self.versions = {"gpu": core.get_property(self.name, _NAME)}
        except RuntimeError as error:
            raise BackendError(
                f"backend '{backend}' needs a GPU of Intel, and openvino finds none here, only "
                f"{', '.join(core.available_devices)}. Install the GPU's OpenCL driver (Debian, Ubuntu: apt install "
                "intel-opencl-icd) and add this user to the group 'render', or take --backend openvino."
            ) from error
        self._core, self._fp32 = core, compute == "fp32"
        self.cache = "fp32" if self._fp32 else "fp16"
        self.compute = "fp32" if self._fp32 else f"fp16, {_INT8}"

    def properties(self, read: Any, *, weights: bool) -> dict[str, Any]:
        precision = "f16" if weights and not self._fp32 else "f32"
        asked: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        asked |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        return asked | ({"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if self._fp32 else {})

    def free_bytes(self) -> int:
        """Bytes of its memory that are free; 0 for one beside the processor, whose openvino tells only in all."""
        try:
            within = str(self._core.get_property(self.name, "DEVICE_TYPE")) == "Type.INTEGRATED"
        except RuntimeError:
            return 0
        return available_bytes() if within else 0


def _has_amx(openvino: Any, core: Any) -> bool:
    """Whether openvino multiplies with AMX here: no property tells, so a small product is asked for its kernel."""
    ops = openvino.opset15
    rows = ops.parameter([2, 64], np.float32)
    product = ops.matmul(rows, ops.constant(np.ones((64, 64), np.float32)), False, False)
    try:
        compiled = core.compile_model(
            openvino.Model([product], [rows]), Cpu.name, {"INFERENCE_PRECISION_HINT": "bf16"}
        )
    except RuntimeError:
        # It says that it has bf16 and cannot compute in it: the first graph that is loaded tells why.
        return False
    kernels = [node.get_rt_info()["primitiveType"].astype(str) for node in compiled.get_runtime_model().get_ops()]
    return any("amx" in kernel for kernel in kernels)


DEVICES: dict[str, type[Cpu | Gpu]] = {"openvino": Cpu, "openvino-gpu": Gpu}
"""By the name of the backend that computes there."""
