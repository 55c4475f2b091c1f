"""The plugins of domain `sinkprune`: tensors, attributes, the shipped binaries of their kernels, launches, a runner.

`plugin_v3.py` wraps the plugins for TensorRT, and `plugin_graph.py` adapts graphs to them. The function bodies of
`sinkprune.export.pruning.functions` define what they compute.

A kernel's parameters are its inputs, integers and outputs. Masks are int32, not bool: TensorRT's plugins take no BOOL
(NvInferRuntimePlugin.h, `PluginTensorDesc::type`), and the graph has casts.

A plugin is called with a stream handle. cuda-python could launch on it, pycuda cannot (its streams are objects of its
own), and a board may carry either; the driver's library is on all of them. Six of its functions are enough, called
by ctypes. Source: CUDA Driver API, "Module Management" and "Execution Control".
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from sinkprune.contract.budgets import diversity_group
from sinkprune.contract.errors import BackendError

ARCHIVE = "kernels.zip"
"""The file of all shipped kernels, next to this module."""
INDEX = "index.json"
"""The member of the archive that lists all others: kernel, type of the tokens, sm, launch parameters, sums."""

KERNELS = {"TopRho": ("top_rho",), "DiversitySelect": ("diversity_phase", "diversity_phase_unaligned")}
"""The names of the kernels of each plugin, by the plugin's name; `compile.py` compiles them."""


@dataclass(frozen=True)
class Binary:
    """The code of one kernel for one type of tokens and one GPU, and the parameters of its launch."""

    image: bytes
    """A cubin or PTX, for `KernelRunner`."""
    entry: str
    """The name of the function in the image."""
    threads: int
    """Threads of a block."""
    shared_bytes: int
    """Dynamic shared memory of a block, in bytes; at most 48 KiB, which a launch may use without permission."""


def binary(kernel: str, dtype: str, sm: int) -> Binary:
    """Return the cubin of `kernel` for tokens of `dtype` on exactly `sm`, e.g. 87.

    Without a cubin for `sm`, return the PTX of the highest lower one, which the driver compiles. Raises
    `BackendError` if there is neither.
    """
    shipped = {entry["sm"]: entry for entry in _entries() if (entry["kernel"], entry["dtype"]) == (kernel, dtype)}
    older = [other for other, entry in shipped.items() if other < sm and entry["portable"]]
    if sm not in shipped and not older:
        known = ", ".join(f"sm_{each}" for each in sorted(shipped)) or "none"
        raise BackendError(
            f"the kernel {kernel} for {dtype} tokens is shipped for {known}, and this GPU is sm_{sm}, which is older "
            "than all of them. Build the engines again on it; they then do without plugins."
        )
    entry, form = (shipped[sm], "cubin") if sm in shipped else (shipped[max(older)], "ptx")
    return Binary(_member(entry[form]), entry["entry"], entry["threads"], entry["shared_bytes"])


def sha256(plugin: str) -> str:
    """Return the sha256 over all shipped binaries of `plugin` (`TopRho` or `DiversitySelect`)."""
    sums = [entry["sha256"] for entry in _entries() if entry["kernel"] in KERNELS[plugin]]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def shipped_sms() -> tuple[int, ...]:
    """Return the GPUs that kernels are shipped for, e.g. 87 for sm_87, ascending."""
    return tuple(sorted({entry["sm"] for entry in _entries()}))


@cache
def _entries() -> list[dict[str, Any]]:
    return json.loads(_member(INDEX))["entries"]


def _member(name: str) -> bytes:
    """Return a file of the archive; raises `BackendError` if Python cannot unpack it."""
    try:
        with (files("sinkprune.engines.plugins") / ARCHIVE).open("rb") as file, zipfile.ZipFile(file) as archive:
            return archive.read(name)
    except RuntimeError as error:
        raise BackendError(
            f"the compiled kernels cannot be unpacked: {error}. Use a Python that was built with lzma, as the "
            "system's is."
        ) from error


COLUMNS = 64
"""The columns of `tokens` that one block of the kernel `top_rho` averages."""
ROWS = 32
"""The tokens that one block of the kernel `diversity_phase` compares at a time."""
MOST_BLOCKS = 128
"""The most blocks of a group. Each block finds the smallest similarities itself, so more blocks are not faster."""
SCRATCH_ROWS = 4
"""Rows of N fp32 that `DiversitySelect` needs for a group: scale, 1 / length, and the similarity twice."""
ALIGNMENT = 16
"""The fast kernels need `tokens` with a width in elements and an address in bytes that are multiples of this."""


@dataclass(frozen=True)
class Launch:
    """One kernel to enqueue; `binary(launch.kernel, launch.dtype, sm)` has its code and its threads."""

    kernel: str
    dtype: str
    """The type of the tokens: `float32`, `float16` or `bfloat16`."""
    grid: tuple[int, int, int]
    """Blocks along three axes."""
    arguments: tuple[np.uint64 | np.int32, ...]
    """Addresses are uint64, integers int32."""


def top_rho_launches(addresses: Mapping[str, int], sizes: Mapping[str, int], dtype: str) -> list[Launch]:
    """Return the launch of `TopRho`: the mean of each group's `count` tokens of largest norm, and their mask.

    `addresses` by name: norms [G,N] fp32, tokens [G,N,D] of `dtype`; out: sink [G,1,D] of `dtype`, outlier [G,N]
    int32, 1 or 0. `sizes` are G, N, D and `count`, which is at least 1.
    """
    grid = (-(-sizes["D"] // COLUMNS), sizes["G"], 1)
    inputs, outputs = _addresses(addresses, "norms", "tokens"), _addresses(addresses, "sink", "outlier")
    integers = map(np.int32, (sizes["N"], sizes["D"], sizes["count"]))
    return [Launch("top_rho", dtype, grid, (*inputs, *integers, *outputs))]


def diversity_workspace(groups: int, n: int) -> int:
    """Return the bytes of workspace that `diversity_launches` needs: fp32 [G,4,N]."""
    return groups * SCRATCH_ROWS * n * 4


def diversity_launches(addresses: Mapping[str, int], sizes: Mapping[str, int], dtype: str) -> list[Launch]:
    """Return the launches of `DiversitySelect`, one a phase: `count` candidates a group, in at least `rounds` rounds.

    Each round chooses the candidates that are least similar to the kept tokens.

    `addresses` by name: tokens [G,N,D] of `dtype`, candidate [G,N] int32, not 0 where true, at least `count` in each
    group, reserved [G,R] int64 (any address where R is 0); out: chosen [G,`count`] int64, ascending; workspace.
    `sizes` are G, N, D, R, `count` and `rounds`. The last phase only chooses, so it takes one block a group.
    """
    n, width, count = sizes["N"], sizes["D"], sizes["count"]
    batch = diversity_group(count, sizes["rounds"])
    # Vector loads need alignment.
    aligned = width % ALIGNMENT == 0 and addresses["tokens"] % ALIGNMENT == 0
    kernel = "diversity_phase" if aligned else "diversity_phase_unaligned"
    inputs = _addresses(addresses, "tokens", "candidate", "reserved")
    outputs = _addresses(addresses, "chosen", "workspace")
    # Lengths, similarity to reserved tokens, then one a round.
    phases = 2 + -(-count // batch) if count else 0
    launches = []
    for phase in range(phases):
        blocks = min(-(-n // ROWS), MOST_BLOCKS) if phase + 1 < phases else 1
        integers = map(np.int32, (n, width, sizes["R"], count, batch, phase, phase + 1))
        launches.append(Launch(kernel, dtype, (blocks, sizes["G"], 1), (*inputs, *integers, *outputs)))
    return launches


def _addresses(addresses: Mapping[str, int], *names: str) -> list[np.uint64]:
    return [np.uint64(addresses[name]) for name in names]


DOMAIN = "sinkprune"
"""The ONNX domain of the nodes that plugins replace."""
# TensorRT finds a plugin by name, version and namespace.
NAMESPACE = "sinkprune"
VERSION = "1"

Sizes = Mapping[str, int]
"""The sizes of a call by name: G groups of N tokens of width D, R reserved tokens, and the plugin's attributes."""
TensorType = Literal["tokens", "float32", "int64", "mask"]
"""The element type of a plugin's tensor. `tokens` is float32, float16 or bfloat16. A `mask` is BOOL in the graph and
INT32 at the plugin: TensorRT's plugins take no BOOL (NvInferRuntimePlugin.h, `PluginTensorDesc::type`)."""


def token_types(library: Any) -> dict[Any, str]:
    """Return the types of tokens as in `Launch.dtype`, by the member of `DataType` of `library`."""
    types = library.DataType
    return {types.FLOAT: "float32", types.HALF: "float16", types.BF16: "bfloat16"}


def tensor_types(library: Any, tokens: Any) -> dict[TensorType, Any]:
    """Return the member of `DataType` of `library` for each type of tensor, with `tokens` for that of the tokens."""
    types = library.DataType
    return {"tokens": tokens, "float32": types.FLOAT, "int64": types.INT64, "mask": types.INT32}


@dataclass(frozen=True)
class PluginTensor:
    """An input or output of a plugin."""

    name: str
    type: TensorType
    shape: tuple[str | int, ...]
    """The size of each dimension, fixed or by its name in `Sizes`."""


@dataclass(frozen=True)
class Plugin:
    """The inputs, outputs and launches of a plugin."""

    name: str
    """The name of the plugin, and the operator of the ONNX nodes that it replaces."""
    inputs: tuple[PluginTensor, ...]
    shape_inputs: tuple[PluginTensor, ...]
    """Inputs after `inputs` whose values are sizes. A constant one is an attribute of the same name instead."""
    outputs: tuple[PluginTensor, ...]
    attributes: tuple[str, ...]
    """The names of the integers that every node has as attributes."""
    workspace: Callable[[Sizes], int]
    """Bytes that `launches` needs in addition to its tensors; they grow with every size."""
    launches: Callable[[Mapping[str, int], Sizes, str], list[Launch]]
    """Its kernels in order, from device addresses (by tensor name, and `workspace`), sizes, and the tokens' type as
    `Launch.dtype` names it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of all integers that a node may have as attributes: `attributes`, and constant shape inputs."""
        return (*self.attributes, *(tensor.name for tensor in self.shape_inputs))

    @property
    def tokens(self) -> int:
        """The number of the input with the tokens, counted from 0."""
        return [tensor.type for tensor in self.inputs].index("tokens")


def sizes_of(tensors: Sequence[PluginTensor], shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the sizes of `tensors` by name, from their `shapes`, one shape for each tensor."""
    return {
        name: size
        for tensor, shape in zip(tensors, shapes, strict=True)
        for name, size in zip(tensor.shape, shape, strict=True)
        if isinstance(name, str)
    }


def _top_rho(addresses: Mapping[str, int], sizes: Sizes, dtype: str) -> list[Launch]:
    count = max(1, -(-sizes["N"] * sizes["per_mille"] // 1000))
    return top_rho_launches(addresses, {**sizes, "count": count}, dtype)


_PLUGINS = (
    Plugin(
        name="TopRho",
        inputs=(PluginTensor("norms", "float32", ("G", "N")), PluginTensor("tokens", "tokens", ("G", "N", "D"))),
        shape_inputs=(),
        outputs=(PluginTensor("sink", "tokens", ("G", 1, "D")), PluginTensor("outlier", "mask", ("G", "N"))),
        attributes=("per_mille",),
        workspace=lambda sizes: 0,
        launches=_top_rho,
    ),
    Plugin(
        name="DiversitySelect",
        inputs=(
            PluginTensor("tokens", "tokens", ("G", "N", "D")),
            PluginTensor("candidate", "mask", ("G", "N")),
            PluginTensor("reserved", "int64", ("G", "R")),
        ),
        shape_inputs=(PluginTensor("count", "int64", (1,)),),
        outputs=(PluginTensor("chosen", "int64", ("G", "count")),),
        attributes=("rounds",),
        workspace=lambda sizes: diversity_workspace(sizes["G"], sizes["N"]),
        launches=diversity_launches,
    ),
)
PLUGINS = {plugin.name: plugin for plugin in _PLUGINS}
"""The plugins of domain `sinkprune`, by the operator."""


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
            values = [
                (ctypes.c_uint64 if isinstance(argument, np.uint64) else ctypes.c_int32)(int(argument))
                for argument in launch.arguments
            ]
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
