"""The backends there are, and what is known of each before its library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.system.memory_need import OPENVINO, ORT_CPU, BackendMemory

Compute = Literal["fastest", "bf16", "fp32"]
"""What a backend that has the choice computes in. Selection is in fp32 always.

`fastest`: in ort-cpu int8 for rows that meet quantised weights; in openvino bf16 where the processor has it, and
int8 for such rows where the library finds that faster; in openvino-gpu fp16, or int8 in the same way;
ort-cpu+openvino has the tower in openvino's types.
`bf16`: openvino alone, for all but selection. `fp32`: rows are not rounded, and openvino computes all in fp32.
"""
COMPUTES: tuple[Compute, ...] = get_args(Compute)
TOWER_IN = "; vision in "
"""Stands in reports between what graphs are computed in and what the vision tower is, where that is another."""


@dataclass(frozen=True)
class BackendSpec:
    """What a backend is. Adding a backend is its module and its row in `KNOWN`."""

    module: str
    """The module of this package whose `open_backend(name, threads, compute, built)` returns the `Backend`."""
    target: Target
    """What its engines are built for (`sinkprune-build --target`)."""
    libraries: tuple[str, ...]
    """The Python modules that it imports."""
    computes: tuple[Compute, ...] = ()
    """What it can be asked to compute in; nothing where it computes in the types of a bundle's graphs."""
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
"""By name. The first runs bundles where no backend is named, the first of a target its engines."""
BACKENDS = tuple(KNOWN)
ON_CPU = tuple(name for name, spec in KNOWN.items() if not spec.on_gpu)
