"""The table of backends: what is known of each before its library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.system.memory_need import OPENVINO, ORT_CPU, BackendMemory

Compute = Literal["fastest", "bf16", "fp32"]
"""The type of computation, where a backend has the choice. Selection is always in fp32.

- `fastest`: ort-cpu rounds activations to int8 for quantised weights. openvino computes in bf16 where the processor
  has it, and rounds in the same way where that is faster. openvino-gpu does the same with fp16. ort-cpu+openvino has
  the vision tower in openvino's types.
- `bf16`: openvino only, for all but selection.
- `fp32`: activations are not rounded, and openvino computes in fp32.
"""
COMPUTES: tuple[Compute, ...] = get_args(Compute)
TOWER_IN = "; vision in "
"""In reports: separates the type of computation from that of the vision tower, where they differ."""


@dataclass(frozen=True)
class BackendSpec:
    """The facts about a backend. A new backend is a module and a row in `KNOWN`."""

    module: str
    """The module of this package whose `open_backend(name, threads, compute, built)` returns the `Backend`."""
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
    runs_new_budgets: bool = False
    """Whether `sinkprune-calibrate schedule` may try budgets on it that no engine was built for."""


KNOWN = {
    "ort-cpu": BackendSpec(
        "onnxruntime.backend",
        "onnxruntime",
        ("onnxruntime",),
        computes=("fastest", "fp32"),
        memory=BackendMemory(ORT_CPU),
        runs_new_budgets=True,
    ),
    "ort-cpu+openvino": BackendSpec(
        "openvino.with_onnxruntime",
        "onnxruntime+openvino",
        ("onnxruntime", "openvino"),
        computes=("fastest", "fp32"),
        memory=BackendMemory(ORT_CPU, OPENVINO),
        runs_new_budgets=True,
    ),
    "ort-cuda": BackendSpec(
        "onnxruntime.backend", "onnxruntime", ("onnxruntime",), on_gpu=True, runs_new_budgets=True
    ),
    "openvino": BackendSpec(
        "openvino.backend",
        "openvino",
        ("openvino",),
        computes=COMPUTES,
        memory=BackendMemory(OPENVINO),
        runs_new_budgets=True,
    ),
    "openvino-gpu": BackendSpec(
        "openvino.backend", "openvino", ("openvino",), ("fastest", "fp32"), on_gpu=True, takes_threads=False
    ),
    "tensorrt": BackendSpec("tensorrt.backend", "tensorrt", ("tensorrt",), on_gpu=True, takes_threads=False),
    "tensorrt-rtx": BackendSpec(
        "tensorrt.backend", "tensorrt-rtx", ("tensorrt_rtx",), on_gpu=True, takes_threads=False
    ),
}
"""By name. The first backend is the default for bundles, and the first of a target the default for its engines."""
BACKENDS = tuple(KNOWN)
ON_CPU = tuple(name for name, spec in KNOWN.items() if not spec.on_gpu)
