"""The table of backends: what is known of each before its library is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

from sinkprune.contract.memory import OPENVINO, ORT_CPU, BackendMemory, in_both
from sinkprune.contract.registry import Registry

if TYPE_CHECKING:
    from sinkprune.contract.engines_manifest import Engines, Target

Compute = Literal["fastest", "bf16", "fp32"]
"""The type of computation, where a backend has the choice. Selection is always in fp32.

- `fastest`: ort-cpu rounds activations to int8 for quantised weights. openvino computes in bf16 where the processor
  has it, and rounds in the same way where that is faster. openvino-gpu does the same with fp16. ort-cpu+openvino has
  the vision tower in openvino's types, and ort-cpu+openvino-prefill the whole prompt.
- `bf16`: openvino only, for all but selection.
- `fp32`: activations are not rounded, and openvino computes in fp32.
"""
COMPUTES: tuple[Compute, ...] = get_args(Compute)
TOWER_IN = "; vision in "
"""In reports: separates the type of computation from that of the vision tower, where they differ."""


@dataclass(frozen=True)
class BackendSpec:
    """The facts about a backend. CONTRIBUTING.md says how to add one."""

    opened_by: str
    """The function that returns the `Backend`, as in `package.module:open_backend`. It is called with the name, the
    threads, the compute and the `BuiltEngines`, as `load_backend` gets them."""
    target: Target
    """The target of its engines (`sinkprune-build --target`)."""
    libraries: tuple[str, ...]
    """The Python modules that it imports."""
    computes: tuple[Compute, ...] = ()
    """The types of computation to choose from; none where it computes in the types of a bundle's graphs."""
    on_gpu: bool = False
    takes_threads: bool = True
    memory: BackendMemory | None = None
    """How it holds weights in memory; None on GPUs, where it was not measured."""


_OURS = "sinkprune.runtime.backends"
ORT_ON_CPU = BackendSpec(
    f"{_OURS}.onnxruntime.backend:open_backend",
    "onnxruntime",
    ("onnxruntime",),
    computes=("fastest", "fp32"),
    memory=BackendMemory(ORT_CPU),
)
ORT_WITH_OPENVINO = BackendSpec(
    f"{_OURS}.openvino.backend:open_with_onnxruntime",
    "onnxruntime+openvino",
    ("onnxruntime", "openvino"),
    computes=("fastest", "fp32"),
    memory=BackendMemory(ORT_CPU, OPENVINO),
)
ORT_WITH_OPENVINO_PREFILL = replace(
    ORT_WITH_OPENVINO,
    opened_by=f"{_OURS}.openvino.prefill:open_backend",
    memory=BackendMemory(in_both(OPENVINO, ORT_CPU), OPENVINO),
)
ORT_CUDA = replace(
    ORT_ON_CPU, opened_by=f"{_OURS}.onnxruntime.cuda:open_backend", computes=(), on_gpu=True, memory=None
)
OPENVINO_CPU = BackendSpec(
    f"{_OURS}.openvino.backend:open_backend",
    "openvino",
    ("openvino",),
    computes=COMPUTES,
    memory=BackendMemory(OPENVINO),
)
OPENVINO_GPU = BackendSpec(
    OPENVINO_CPU.opened_by, "openvino", ("openvino",), ("fastest", "fp32"), on_gpu=True, takes_threads=False
)
TENSORRT = BackendSpec(f"{_OURS}.tensorrt:open_backend", "tensorrt", ("tensorrt",), on_gpu=True, takes_threads=False)
TENSORRT_RTX = replace(TENSORRT, target="tensorrt-rtx", libraries=("tensorrt_rtx",))

KNOWN = Registry[BackendSpec]("sinkprune.backends")
"""Every backend that an installed package registers, by name."""
_QUICKEST = ("ort-cpu+openvino", "openvino", "ort-cpu")
"""For a bundle on a CPU: OpenVINO has the faster tower, ONNX Runtime the faster tokens and the faster loading."""


def quickest_backend(installed: Callable[[str], bool]) -> str:
    """Return the first of `_QUICKEST` whose modules are all `installed`; without any, the last."""
    return next((name for name in _QUICKEST if all(map(installed, KNOWN[name].libraries))), _QUICKEST[-1])


def is_installed(module: str) -> bool:
    """Return whether Python finds the `module`, which is not imported."""
    return find_spec(module) is not None


def usual_backend(engines: Engines | None) -> str:
    """Return the default backend of a bundle: that of its `engines`, or the quickest that is installed."""
    return quickest_backend(is_installed) if engines is None else backend_of(engines.manifest.target)


_USUAL: dict[Target, str] = {"onnxruntime": "ort-cpu", "onnxruntime+openvino": "ort-cpu+openvino"}
"""The default backends of targets that no backend is named after."""


def backend_of(target: Target) -> str:
    """Return the default backend of engines built for `target`."""
    own = _USUAL.get(target, target)
    return own if own in KNOWN else next(name for name, spec in KNOWN.items() if spec.target == target)


def on_cpu() -> list[str]:
    """Return the names of the backends that compute on the processor."""
    return [name for name, spec in KNOWN.items() if not spec.on_gpu]
