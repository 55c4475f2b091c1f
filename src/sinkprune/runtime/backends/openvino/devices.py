"""OpenVINO: its import, its devices and their versions."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sinkprune.contract.checks import install_command
from sinkprune.contract.errors import BackendError
from sinkprune.contract.memory import available_bytes
from sinkprune.runtime.backends.known import Compute
from sinkprune.runtime.backends.openvino.graphs import group_in_int8
from sinkprune.runtime.system import bound_cores, usable_cores

# Importing this module writes an identifier to the home directory, and reports the import to the vendor.
_REPORTS = "openvino.tools.ovc"
_LONGEST = 300


def import_openvino(name: str) -> Any:
    """Import the library, for the backend or target `name`; raises `BackendError`.

    A robot must not report to anybody. So openvino's model converter, which does, is hidden from the import. If other
    code imported openvino earlier, it has already reported.
    """
    known = _REPORTS in sys.modules
    if not known:
        sys.modules[_REPORTS] = None  # type: ignore[assignment]
    try:
        import openvino
        import openvino.frontend.onnx
        import openvino.op.util
        import openvino.opset15
    except ImportError as error:
        raise BackendError(
            f"'{name}' needs openvino, and its import failed: {error}. "
            f"Install it with: {install_command('openvino')}. Or take --backend ort-cpu."
        ) from error
    finally:
        if not known:
            del sys.modules[_REPORTS]
    return openvino


def words(error: Exception) -> str:
    """Return openvino's message in one line, without its final full stop and without places in openvino's code."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith("Exception from"))
    return (message or " ".join(lines))[:_LONGEST].removesuffix(".")


_NAME = "FULL_DEVICE_NAME"
_INT8 = "int8 where openvino finds it faster"
_KERNELS = 100
"""For how many shapes OpenVINO keeps kernels, for each kind of operator of a graph.

Its default is 5000. Then a process grows by megabytes with each new number of rows.
"""


class Cpu:
    """The processor: bf16 where it has it, and activations rounded to int8 for int8 and int4 weights.

    With AMX, activations stay bf16, because OpenVINO does not round them there, and rows fill whole blocks.
    """

    name = "CPU"

    def __init__(self, core: Any, backend: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` for the `compute` bf16 on a processor without bf16."""
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
        self.versions: dict[str, str] = {}
        # Whether incomplete blocks of rows take longer than full ones.
        self.fills_blocks = self.cache == "bf16" and _has_amx(import_openvino(backend), core)

    def properties(self, read: Any, *, weights: bool) -> dict[str, Any]:
        """Return the properties to compile the model `read` with; a model without `weights` selects tokens."""
        precision = "bf16" if weights and self.cache == "bf16" else "f32"
        return {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": self.threads,
            # OpenVINO pins threads to the first cores, the caller's too: programs of few threads would share those.
            "ENABLE_CPU_PINNING": self.threads >= bound_cores(),
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_in_int8(read) if self._int8 else 0,
            "CPU_RUNTIME_CACHE_CAPACITY": _KERNELS,
        }


class Gpu:
    """The first Intel GPU, integrated or discrete: fp16, unless `compute` is fp32."""

    name = "GPU"
    threads = 1
    """The thread that enqueues work."""
    fills_blocks = False

    def __init__(self, core: Any, backend: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` without a GPU or its driver."""
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
        return {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            **({"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if self._fp32 else {}),
        }

    def free_bytes(self) -> int:
        """Return the bytes of free memory; 0 for a discrete GPU, of which openvino reports the total only."""
        try:
            integrated = str(self._core.get_property(self.name, "DEVICE_TYPE")) == "Type.INTEGRATED"
        except RuntimeError:
            return 0
        return available_bytes() if integrated else 0


def _has_amx(openvino: Any, core: Any) -> bool:
    """Return whether openvino multiplies with AMX here. No property shows it, so compile a small product."""
    ops = openvino.opset15
    rows = ops.parameter([2, 64], np.float32)
    product = ops.matmul(rows, ops.constant(np.ones((64, 64), np.float32)), False, False)
    try:
        compiled = core.compile_model(
            openvino.Model([product], [rows]), Cpu.name, {"INFERENCE_PRECISION_HINT": "bf16"}
        )
    except RuntimeError:
        # OpenVINO claims bf16 and cannot compute in it. Loading the first graph raises the reason.
        return False
    kernels = [node.get_rt_info()["primitiveType"].astype(str) for node in compiled.get_runtime_model().get_ops()]
    return any("amx" in kernel for kernel in kernels)


DEVICES: dict[str, type[Cpu | Gpu]] = {"openvino": Cpu, "openvino-gpu": Gpu}
"""By the name of the backend that computes there."""
